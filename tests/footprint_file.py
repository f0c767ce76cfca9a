"""The code that each test of a commit ran, tests/footprints.xz, and the parts of a file that it speaks of.

A footprint lists the functions that a test runs, in any process, and the other files that it opens
(tests/footprints.py records them). Functions are identified by name, wherever they are in their file.
"""

import ast
import hashlib
import itertools
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

FOOTPRINTS = Path(__file__).with_name("footprints.xz")
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}]  # pb: bytes, not words
REST = "<rest>"  # code outside functions, or the whole content of a non-Python file


# ---- the parts of a file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function, or a method as Class.method. first, last: its lines, including decorators."""

    name: str
    first: int
    last: int
    digest: str


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def functions_of(text: str) -> list[Function]:
    """Return the outermost functions of a Python file; nested functions belong to them."""
    functions = []
    lines = text.splitlines()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                body = "\n".join(lines[first - 1 : child.end_lineno])
                functions.append(Function(prefix + child.name, first, child.end_lineno, digest_of(body)))
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return functions


def get_parts(file: str, text: str) -> dict[str, str]:
    """Return {name of a function, or REST: digest of its text}."""
    if not file.endswith(".py"):
        return {REST: digest_of(text)}
    lines = text.splitlines()
    parts = {}
    for function in functions_of(text):
        name = function.name
        while name in parts:  # redefined in another branch
            name += "'"
        parts[name] = function.digest
        for number in range(function.first - 1, function.last):
            lines[number] = ""
    parts[REST] = digest_of("\n".join(line for line in lines if line.strip()))
    return parts


# ---- footprints --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprints:
    """The footprints of the tests at a commit.

    columns: (file, function or REST) of each bit of a footprint.
    tests: {node id: (seconds, outcome, footprint)}.
    """

    commit: str
    summary: dict
    columns: list[tuple[str, str]]
    tests: dict[str, tuple[float, str, int]]


NOTHING = Footprints(commit="", summary={}, columns=[], tests={})


def read_footprints(file: Path = FOOTPRINTS) -> Footprints:
    head, _, matrix = lzma.decompress(file.read_bytes()).partition(b"\n")
    tree = json.loads(head)
    columns = [(of_file, name) for of_file, names in tree["columns"] for name in names]
    functions = functions_in(columns)
    height = 8 * len(matrix) // len(functions)
    digits = transposed(f"{int.from_bytes(matrix, 'big'):0{height * len(functions)}b}", height)
    tests = {}
    at = 0
    measured = zip(tree["seconds"], tree["outcomes"])
    for (step, *cases), row in zip(tree["groups"], digits):
        at += step
        bits = int(row, 2) ^ 1 << at
        for case, (seconds, outcome) in zip(cases, measured):
            tests[functions[at] + case] = (seconds, outcome, bits)
    return Footprints(tree["commit"], tree["summary"], columns, tests)


def write_footprints(footprints: Footprints, file: Path = FOOTPRINTS) -> None:
    """Write a line of JSON followed by the bits. Seconds are rounded to two digits.

    Parametrized cases of a function with the same footprint form a group, and similar groups are adjacent.
    "groups": [steps from the previous group's column to this one's, the suffix of each node id].
    The bits are stored column by column, the last column first, one bit a group, padded to whole bytes. The
    bit of a group's own function is inverted: 0 where it ran.
    """
    functions = functions_in(footprints.columns)
    place = {function: at for at, function in enumerate(functions)}

    def group_of(name: str) -> tuple[int, int]:
        return footprints.tests[name][2], place.get(name.partition("[")[0], place[""])

    # the groups, and the bits of each as digits
    names = sorted(footprints.tests, key=group_of)
    groups, rows = [], []
    before = 0
    for (bits, at), group in itertools.groupby(names, key=group_of):
        groups.append([at - before, *(name.removeprefix(functions[at]) for name in group)])
        rows.append(f"{bits ^ 1 << at:0{len(functions)}b}")
        before = at

    # column by column
    rows += ["0" * len(functions)] * (-len(rows) % 8)
    digits = "".join(transposed("".join(rows), len(functions)))
    matrix = int(digits, 2).to_bytes(len(digits) // 8, "big")

    columns: list[tuple[str, list[str]]] = []
    for of_file, of_columns in itertools.groupby(footprints.columns, key=lambda column: column[0]):
        columns.append((of_file, [name for _, name in of_columns]))
    tree = {
        "commit": footprints.commit,
        "summary": footprints.summary,
        "columns": columns,
        "groups": groups,
        "seconds": [float(f"{footprints.tests[name][0]:.2g}") for name in names],
        "outcomes": [footprints.tests[name][1] for name in names],
    }
    head = json.dumps(tree, separators=(",", ":")).encode()
    file.write_bytes(lzma.compress(head + b"\n" + matrix, filters=FILTERS))


def functions_in(columns: list[tuple[str, str]]) -> list[str]:
    """Return the node-id prefix of the test function of each column, then "" for tests without a column."""
    return [*(f"{file}::{name.replace('.', '::')}" for file, name in columns), ""]


def transposed(digits: str, width: int) -> list[str]:
    """Return the columns of a matrix stored as concatenated rows of `width` digits."""
    return [digits[at::width] for at in range(width)]

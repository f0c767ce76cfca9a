"""Mutants drawn from the whole core by a seed."""

import ast
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from config import ConfigError
from lab.proof.mutate.mutant import Mutant, make_mutant
from lab.proof.mutate.operators import OPERATORS, called_name
from lab.proof.mutate.source import Edit, Source

CORE_FOLDERS = ("model", "parallel", "optim", "data", "checkpoint")
CORE_FILES = (
    "durable/consolidate.py",
    "durable/continue_from.py",
    "durable/copies.py",
    "durable/memory.py",
    "durable/memory_saves.py",
    "durable/mirror.py",
    "durable/progress.py",
    "durable/rewind.py",
    "durable/start_layout.py",
    "durable/uploader.py",
    "runtime/closing.py",
    "runtime/evaluate.py",
    "runtime/run.py",
    "train.py",
    "start.py",
    "phases.py",
    "services.py",
    "build.py",
)
NOT_DRAWN = "data/harness.py"  # most of it runs only where lm-eval is installed

# Calls whose arguments are messages.
MESSAGE_CALLS = (
    "print",
    "warn",
    "log_line",
    "warning",
    "ConfigError",
    "IntegrityError",
    "ValueError",
    "RuntimeError",
    "KeyError",
    "TypeError",
)


class GpuOnly(NamedTuple):
    """Code that only a GPU runs, although its text does not name cuda.

    `pattern` matches the whole text of a statement or of a keyword argument, in files whose path starts with
    file_prefix.
    """

    file_prefix: str
    pattern: str
    reason: str


GPU_ONLY = (
    GpuOnly("parallel/offload.py", r"class CopyStream\b.*", "a stream of a GPU, nothing on a CPU"),
    GpuOnly(
        "parallel/offload.py",
        r"(self\.)?\w+\.(wait_for_compute|make_compute_wait|synchronize)\(.*\)",
        "orders two streams of a GPU",
    ),
    GpuOnly("parallel/offload.py", r"with (self\.)?\w+\.context\(\)", "chooses a stream of a GPU"),
    GpuOnly(
        "parallel/offload.py",
        r"\w+\.copied_event = self\.copy_stream\.record_event\(\)",
        "an event of a GPU, None on a CPU",
    ),
    GpuOnly("parallel/wire/clock.py", r"if self\.device is not None:.*", "events of a GPU"),
    GpuOnly("parallel/wire/clock.py", r"event.*|return event", "an event of a GPU"),
    GpuOnly("parallel/wire/clock.py", r"\w+\.synchronize\(\)|return \w+\.elapsed_time.*", "events of a GPU"),
    GpuOnly(
        "parallel/wire/comm.py",
        r"(\w+) = \[\1\[-1\]\] \* len\(\w+\)",
        "nccl has one work for all transfers",
    ),
    GpuOnly("optim/base.py", r"pin_memory=.*", "memory is pinned for a GPU"),
    GpuOnly("", r"non_blocking=True", "a copy on a CPU is done when it returns"),
)


def core_files(root: Path) -> list[str]:
    """Return the sources that mutants are drawn from, relative to root."""
    names = []
    for folder in CORE_FOLDERS:
        for path in sorted(root.glob(f"{folder}/**/*.py")):
            if path.read_text().strip() and path != root / NOT_DRAWN:
                names.append(str(path.relative_to(root)))
    return names + [name for name in CORE_FILES if (root / name).exists()]


# ---- where mutants can be ----------------------------------------------------------------------------------

NOT_MUTATED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)


def mutable_nodes(node: ast.AST, source: Source) -> Iterator[ast.AST]:
    """Yield the nodes below `node` (including itself) that may be mutated, in source order.

    Skips docstrings, annotations, decorators, raises, messages, __str__ and code that only a GPU runs.
    """
    if is_excluded(node, source):
        return
    if isinstance(node, (ast.If, ast.IfExp)) and "cuda" in source.get_text(node.test):
        children = cpu_branch(node)
    else:
        yield node
        children = mutable_children(node)
    for child in children:
        yield from mutable_nodes(child, source)


def is_excluded(node: ast.AST, source: Source) -> bool:
    """Return whether the node and everything in it are exempt from mutation."""
    if isinstance(node, NOT_MUTATED):
        return True
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name in ("__str__", "__repr__")
    if isinstance(node, (ast.AnnAssign, ast.Assert)):
        return False
    if isinstance(node, (ast.If, ast.IfExp)):
        return "__main__" in source.get_text(node.test)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
        return True
    if not isinstance(node, ast.stmt) or hasattr(node, "body"):
        return False
    return "cuda" in source.get_text(node)  # a simple statement


def cpu_branch(node: ast.If | ast.IfExp) -> Sequence[ast.AST]:
    """Return the branch that a CPU takes for a condition on cuda: `x == "cuda"` or `x != "cuda"`."""
    is_not_equal = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.NotEq)
    branch = node.body if is_not_equal else node.orelse
    return branch if isinstance(branch, list) else [branch]


def mutable_children(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node except annotations, decorators and messages."""
    if isinstance(node, ast.FunctionDef):
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        return [*filter(None, defaults), *node.body]
    if isinstance(node, ast.ClassDef):
        return [*node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.Assert):
        return [node.test]
    if isinstance(node, ast.Call) and called_name(node) in MESSAGE_CALLS:
        return []
    return list(ast.iter_child_nodes(node))


def gpu_spans(file: str, source: Source) -> list[tuple[int, int]]:
    """Return the spans of a file that match GPU_ONLY. For a `with` statement only the header counts."""
    patterns = [re.compile(code.pattern, re.DOTALL) for code in GPU_ONLY if file.startswith(code.file_prefix)]
    spans = []
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.stmt, ast.keyword)):
            continue
        start, end = source.span(node)
        if isinstance(node, ast.With):
            end = source.span(node.items[-1].context_expr)[1]
        if any(pattern.fullmatch(source.text, start, end) for pattern in patterns):
            spans.append((start, end))
    return spans


def is_within(edit: Edit, span: tuple[int, int], source: Source) -> bool:
    """Return whether an edit changes nothing outside the span except the comma before it."""
    start, end = span
    text_before = source.text[edit.start : start] if edit.start < start else ""
    is_separator = text_before.strip(" ,\n") == ""
    return is_separator and start < edit.end <= end


@dataclass(frozen=True)
class Site:
    """A node where an operator can make edits."""

    file: str
    operator: str
    edits: tuple[Edit, ...]


def sites(file: str, source: Source) -> list[Site]:
    """Return every site of a file, in source order.

    An edit that several operators make belongs to the first of them.
    """
    found = []
    seen: set[Edit] = set()
    excluded_spans = gpu_spans(file, source)

    def is_allowed(edit: Edit) -> bool:
        if edit in seen or source.text[edit.start : edit.end] == edit.new:
            return False
        return not any(is_within(edit, span, source) for span in excluded_spans)

    for node in mutable_nodes(source.tree, source):
        for name, operator in OPERATORS.items():
            candidates = dict.fromkeys(operator(node, source))
            edits = tuple(filter(is_allowed, candidates))
            seen.update(edits)
            if edits:
                found.append(Site(file, name, edits))
    return found


# ---- which mutants count -----------------------------------------------------------------------------------


def compile_text(text: str, file: str) -> CodeType:
    """Compile the text without warnings. Raises SyntaxError or ValueError if it does not compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mutants cause many: `1 is x`, calling a string, ...
        return compile(text, file, "exec", dont_inherit=True)


def behaviour(code: CodeType) -> tuple:
    """Return what a code object does, ignoring its line numbers."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(behaviour(constant))
        else:
            constants.append((type(constant).__name__, repr(constant)))
    return (
        code.co_code,
        tuple(constants),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags,
        getattr(code, "co_exceptiontable", b""),  # since Python 3.11
    )


def changes_behaviour(text: str, file: str, original: tuple) -> bool:
    """Return whether the text compiles to bytecode that differs from the original."""
    try:
        return behaviour(compile_text(text, file)) != original
    except (SyntaxError, ValueError):
        return False


def draw(root: Path, count: int, seed: int, only: tuple[str, ...] = ()) -> list[Mutant]:
    """Draw `count` mutants, determined by the sources and the seed.

    Each draw picks an operator, one of its sites and one of the site's edits, each uniformly, so an operator
    with few sites (a missing wait) counts as much as one with many. Mutants that compile to the same bytecode
    are skipped.

    `only` restricts the draw to files whose paths start with one of these.
    Raises ConfigError if there are fewer than `count` mutants.
    """
    names = [file for file in core_files(root) if not only or file.startswith(only)]
    sources = {file: Source.parse((root / file).read_text()) for file in names}
    original = {file: behaviour(compile_text(source.text, file)) for file, source in sources.items()}

    # the sites of each operator, in random order
    rng = random.Random(seed)
    remaining: dict[str, list[Site]] = {}
    for file, source in sources.items():
        for site in sites(file, source):
            remaining.setdefault(site.operator, []).append(site)
    for sites_of_operator in remaining.values():
        rng.shuffle(sites_of_operator)

    # an operator with sites left, its next site, the first edit there that changes the bytecode
    mutants: list[Mutant] = []
    while len(mutants) < count:
        operators = [name for name, sites_of_operator in remaining.items() if sites_of_operator]
        if not operators:
            raise ConfigError(f"--draw: {count} mutants, the sources have {len(mutants)}; ask for fewer")
        site = remaining[rng.choice(operators)].pop()
        source = sources[site.file]
        edits = list(site.edits)
        rng.shuffle(edits)
        for edit in edits:
            if changes_behaviour(edit.apply_to(source.text), site.file, original[site.file]):
                mutants.append(make_mutant(site.file, source, site.operator, edit))
                break
    return mutants

"""Mutants drawn from the whole core by a seed."""

import ast
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from config import ConfigError
from scripts.mutate.operators import OPERATORS, called
from scripts.mutate.source import Edit, Source

ROOMS = ("model", "parallel", "optim", "data", "checkpoint")
FILES = ("runtime/evaluate.py", "train.py", "build.py")
SAID = (
    "print",
    "warn",
    "event",
    "warning",
    "ConfigError",
    "IntegrityError",
    "ValueError",
    "RuntimeError",
    "KeyError",
    "TypeError",
)

GPU = (
    ("parallel/offload.py", r"(self\.)?side\.(follows|awaits|settle)\(.*\)", "orders two streams of a GPU"),
    ("parallel/offload.py", r"class Side\b.*", "a stream of a GPU, nothing on a CPU"),
    ("parallel/offload.py", r"with (self\.)?side\.running\(\)", "chooses a stream of a GPU"),
    ("parallel/offload.py", r"if self\.side\.stream is not None:.*", "a stream of a GPU"),
    ("parallel/offload.py", r"ticket\.moment = self\.side\.mark\(\)", "an event of a GPU, None on a CPU"),
    ("parallel/clock.py", r"if self\.device is not None:.*", "events of a GPU"),
    ("parallel/clock.py", r"event.*|return event", "an event of a GPU"),
    ("parallel/clock.py", r"then\.synchronize\(\)|return first\.elapsed_time.*", "events of a GPU"),
    ("parallel/comm.py", r"works = \[works\[-1\]\] \* len\(ops\)", "nccl has one work for all transfers"),
    ("optim/adamw.py", r"pin_memory=.*", "memory is pinned for a GPU"),
    ("", r"non_blocking=True", "a copy on a CPU is done when it returns"),
)  # (start of a file's name, what only a GPU runs without naming cuda: a whole node's text, why)


def core(root: Path) -> list[str]:
    """The sources that mutants are drawn from, relative to root."""
    found = [
        path for room in ROOMS for path in sorted(root.glob(f"{room}/**/*.py")) if path.read_text().strip()
    ]
    return [str(path.relative_to(root)) for path in found] + [
        file for file in FILES if (root / file).exists()
    ]


@dataclass(frozen=True)
class Mutant:
    """One edit of one file. before, after: the lines that differ, as they stood and as they stand; line: the
    first of them."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    edit: Edit

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What tells it from every other mutant of a checkout."""
        return self.file, self.line, self.before, self.after

    def applied(self, text: str) -> str:
        return text[: self.edit.start] + self.edit.new + text[self.edit.end :]

    def difference(self) -> str:
        minus = "".join(f"\n- {line}" for line in self.before.splitlines())
        plus = "".join(f"\n+ {line}" for line in self.after.splitlines())
        return f"{self.file}:{self.line} ({self.operator}){minus}{plus}"


# ---- where a mutant can be ---------------------------------------------------------------------------------


def nodes(tree: ast.AST, source: Source) -> Iterator[ast.AST]:
    """The nodes that may be mutated, in the order of the text: no docstring, annotation, decorator, raise,
    message or __str__, and nothing that only a GPU runs."""
    if isinstance(tree, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
        return
    if isinstance(tree, (ast.FunctionDef, ast.ClassDef)):
        if tree.name in ("__str__", "__repr__"):
            return
        inside = [
            *(
                d
                for d in (
                    [] if isinstance(tree, ast.ClassDef) else [*tree.args.defaults, *tree.args.kw_defaults]
                )
                if d
            ),
            *tree.body,
        ]
    elif isinstance(tree, ast.AnnAssign):
        inside = [tree.value] if tree.value else []
    elif isinstance(tree, ast.Assert):
        inside = [tree.test]
    elif isinstance(tree, (ast.If, ast.IfExp)) and "__main__" in source.of(tree.test):
        return
    elif isinstance(tree, (ast.If, ast.IfExp)) and "cuda" in source.of(tree.test):
        cpu = isinstance(tree.test, ast.Compare) and isinstance(tree.test.ops[0], ast.NotEq)
        taken = tree.body if cpu else tree.orelse
        inside = taken if isinstance(taken, list) else [taken]
        for one in inside:
            yield from nodes(one, source)
        return
    elif isinstance(tree, ast.stmt) and not hasattr(tree, "body") and "cuda" in source.of(tree):
        return
    elif isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    elif isinstance(tree, ast.Call) and called(tree) in SAID:
        inside = []
    else:
        inside = list(ast.iter_child_nodes(tree))
    yield tree
    for one in inside:
        yield from nodes(one, source)


@dataclass(frozen=True)
class Site:
    """A place and a way to spoil it; edits: its forms."""

    file: str
    operator: str
    edits: tuple[Edit, ...]


def gpu_spans(file: str, source: Source) -> list[tuple[int, int]]:
    """Where the text of a file is what GPU lists; of a `with`, its head alone."""
    words = [re.compile(text, re.DOTALL) for start, text, _ in GPU if file.startswith(start)]
    spans = []
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.stmt, ast.keyword)):
            continue
        start, end = source.span(node)
        if isinstance(node, ast.With):
            end = source.span(node.items[-1].context_expr)[1]
        if any(word.fullmatch(source.text, start, end) for word in words):
            spans.append((start, end))
    return spans


def only_there(edit: Edit, span: tuple[int, int], source: Source) -> bool:
    """Whether an edit changes nothing outside the span (but the comma before it)."""
    before = source.text[edit.start : span[0]] if edit.start < span[0] else ""
    return before.strip(" ,\n") == "" and span[0] < edit.end and edit.end <= span[1]


def sites(file: str, source: Source) -> list[Site]:
    """Every site of a file in the order of its text; an edit belongs to the first operator that makes it."""
    found, seen = [], set()
    gpu = gpu_spans(file, source)
    for node in nodes(source.tree, source):
        for name, operator in OPERATORS.items():
            edits = tuple(
                dict.fromkeys(
                    e
                    for e in operator(node, source)
                    if e not in seen
                    and source.text[e.start : e.end] != e.new
                    and not any(only_there(e, span, source) for span in gpu)
                )
            )
            seen.update(edits)
            if edits:
                found.append(Site(file, name, edits))
    return found


# ---- which mutants count -----------------------------------------------------------------------------------


def compiled(text: str, file: str) -> CodeType | None:
    """None where it does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `1 is x`, a text that is called, ...
            return compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def meaning(code: CodeType) -> tuple:
    """What a piece of bytecode does, without where its lines stand."""
    inner = tuple(
        meaning(c) if isinstance(c, CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    return (
        code.co_code,
        inner,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags,
        getattr(code, "co_exceptiontable", b""),  # Python 3.11 on
    )


def mutant(file: str, source: Source, operator: str, edit: Edit) -> Mutant:
    """The mutant of an edit, with the lines that it changes."""
    new = source.text[: edit.start] + edit.new + source.text[edit.end :]
    first, last = source.line(edit.start), source.line(max(edit.start, edit.end - 1))
    old_lines, new_lines = source.text.splitlines(), new.splitlines()
    tail = len(old_lines) - last
    before, after = old_lines[first - 1 : last], new_lines[first - 1 : len(new_lines) - tail]
    return Mutant(file, first, operator, "\n".join(before), "\n".join(after), edit)


def draw(root: Path, n: int, seed: int, only: tuple[str, ...] = ()) -> list[Mutant]:
    """n mutants, a function of the sources and the seed: an operator, one of its sites and one of the site's
    edits, each drawn evenly, so that a kind with few sites (a missing wait) counts like one with many.
    Those that compile to the same bytecode are left out. only: of files whose names begin so. Raises
    ConfigError where there are fewer."""
    names = [file for file in core(root) if not only or file.startswith(only)]
    read = {file: Source.read((root / file).read_text()) for file in names}
    every = [site for file, source in read.items() for site in sites(file, source)]
    rng = random.Random(seed)
    left: dict[str, list[Site]] = {}
    for site in every:
        left.setdefault(site.operator, []).append(site)
    for of_one in left.values():
        rng.shuffle(of_one)

    # an operator that has sites left, its next site, the first edit there that means something
    found: list[Mutant] = []
    same = {file: meaning(compiled(source.text, file)) for file, source in read.items()}
    while len(found) < n:
        kinds = [name for name, of_one in left.items() if of_one]
        if not kinds:
            raise ConfigError(f"--draw: {n} mutants, the sources have {len(found)}; ask for fewer")
        site = left[rng.choice(kinds)].pop()
        source, edits = read[site.file], list(site.edits)
        rng.shuffle(edits)
        for edit in edits:
            one = mutant(site.file, source, site.operator, edit)
            code = compiled(one.applied(source.text), site.file)
            if code is not None and meaning(code) != same[site.file]:
                found.append(one)
                break
    return found


def part_of(mutants: list[Mutant], k: int, m: int) -> list[Mutant]:
    """The k-th of m parts, from 1: every mutant is in exactly one."""
    return mutants[k - 1 :: m]

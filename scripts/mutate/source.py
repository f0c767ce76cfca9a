"""A text with its syntax tree, and edits of spans of it."""

import ast
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set)


@dataclass(frozen=True)
class Edit:
    """text[start:end] becomes `new`."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Source:
    """A text with its tree. starts: where each line begins; modules: names that stand for a module."""

    text: str
    tree: ast.Module
    starts: tuple[int, ...]
    modules: frozenset[str]
    names: dict[ast.AST, tuple[str, ...]]  # function -> what it takes and assigns
    around: dict[ast.AST, ast.AST]  # node -> the function that it stands in
    alone: frozenset[ast.AST]  # calls that are statements

    @staticmethod
    def read(text: str) -> "Source":
        """Raises SyntaxError."""
        tree, starts = ast.parse(text), [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        imported = [
            alias.asname or alias.name.split(".")[0]
            for n in ast.walk(tree)
            if isinstance(n, ast.Import)
            for alias in n.names
        ]
        imported += [
            alias.asname or alias.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom)
            for alias in n.names
            if (alias.asname or alias.name).islower()
        ]
        names, around = {}, {}
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            a = function.args
            taken = [
                arg.arg
                for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)
                if arg.arg not in ("self", "cls", "ctx")
            ]
            made = [
                n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            names[function] = tuple(dict.fromkeys([*taken, *made]))
            around |= {
                n: function for n in ast.walk(function) if n is not function
            }  # the innermost comes last
        alone = frozenset(n.value for n in ast.walk(tree) if isinstance(n, ast.Expr))
        return Source(text, tree, tuple(starts), frozenset(imported), names, around, alone)

    def at(self, line: int, column: int) -> int:
        """The place in the text of a line (from 1) and a column in bytes."""
        first = self.starts[line - 1]
        rest = self.text[first : self.starts[line]]
        return first + (column if rest.isascii() else len(rest.encode()[:column].decode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, place: int) -> int:
        return bisect(self.starts, place)

    def instead(self, node: ast.AST, new: str) -> Edit:
        return Edit(*self.span(node), new)

    def operand(self, node: ast.AST) -> str:
        """Its text, in parentheses where its surroundings could take it apart."""
        return self.of(node) if isinstance(node, ATOMS) else f"({self.of(node)})"

    def between(
        self, left: ast.AST, right: ast.AST, table: dict[str, tuple[str, ...]], sign: str
    ) -> Iterator[Edit]:
        """Edits of the sign that stands between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        bare = re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), self.text[start:end])  # a comment between them
        words = r"\s+".join(map(re.escape, sign.split()))
        found = re.search(rf"(?<!\w){words}(?!\w)" if sign[0].isalpha() else words, bare)
        if found:
            yield from (Edit(start + found.start(), start + found.end(), new) for new in table.get(sign, ()))

"""The text of a file with its syntax tree, and edits of spans of the text."""

import ast
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass

Node = ast.expr | ast.stmt | ast.keyword  # nodes that have a position in the source

# Expressions of these types need no parentheses as operands.
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set)

IMPLICIT_ARGUMENTS = ("self", "cls", "ctx")


def last_line(node: Node) -> int:
    """Return the 1-based number of a parsed node's last line."""
    assert node.end_lineno is not None  # always set by ast.parse
    return node.end_lineno


@dataclass(frozen=True)
class Edit:
    """Replaces text[start:end] by `new`."""

    start: int
    end: int
    new: str

    def apply_to(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


@dataclass(frozen=True)
class Source:
    """The text of a Python file and what the operators need to know about it."""

    text: str
    tree: ast.Module
    line_starts: tuple[int, ...]  # offset of each line
    modules: frozenset[str]  # names bound to modules
    names_of_function: dict[ast.AST, tuple[str, ...]]  # function -> its parameters and the names it assigns
    enclosing_function: dict[ast.AST, ast.AST]  # node -> the innermost enclosing function
    statement_calls: frozenset[ast.AST]  # values of expression statements, mostly calls

    @staticmethod
    def parse(text: str) -> "Source":
        """Parse a Python file. Raises SyntaxError if the text is not valid Python."""
        tree = ast.parse(text)

        line_starts = [0]
        for line in text.splitlines(keepends=True):
            line_starts.append(line_starts[-1] + len(line))

        names_of_function: dict[ast.AST, tuple[str, ...]] = {}
        enclosing_function: dict[ast.AST, ast.AST] = {}
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = [*parameter_names(function), *assigned_names(function)]
            names_of_function[function] = tuple(dict.fromkeys(names))
            # ast.walk visits outer functions first, so the innermost function overwrites them.
            inner_nodes = [node for node in ast.walk(function) if node is not function]
            enclosing_function |= dict.fromkeys(inner_nodes, function)

        statement_values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        return Source(
            text=text,
            tree=tree,
            line_starts=tuple(line_starts),
            modules=imported_names(tree),
            names_of_function=names_of_function,
            enclosing_function=enclosing_function,
            statement_calls=frozenset(statement_values),
        )

    def offset_of(self, line: int, column: int) -> int:
        """Return the text offset of a 1-based line and a column in bytes."""
        start = self.line_starts[line - 1]
        line_text = self.text[start : self.line_starts[line]]
        if line_text.isascii():
            return start + column
        return start + len(line_text.encode()[:column].decode())

    def span(self, node: Node) -> tuple[int, int]:
        """Return the start and end offsets of a node."""
        assert node.end_col_offset is not None  # always set by ast.parse
        start = self.offset_of(node.lineno, node.col_offset)
        end = self.offset_of(last_line(node), node.end_col_offset)
        return start, end

    def text_of(self, node: Node) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line_number(self, offset: int) -> int:
        """Return the 1-based line number at an offset."""
        return bisect(self.line_starts, offset)

    def replace(self, node: Node, new: str) -> Edit:
        start, end = self.span(node)
        return Edit(start, end, new)

    def operand(self, node: Node) -> str:
        """Return the text of a node, parenthesized unless it is an atom."""
        text = self.text_of(node)
        return text if isinstance(node, ATOMS) else f"({text})"

    def replace_symbol(
        self, left: Node, right: Node, replacements: dict[str, tuple[str, ...]], symbol: str
    ) -> Iterator[Edit]:
        """Yield one edit for each replacement of the operator symbol between two nodes."""
        start = self.span(left)[1]
        end = self.span(right)[0]
        without_comments = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self.text[start:end])

        # "not in" and "is not" may contain any whitespace
        pattern = r"\s+".join(map(re.escape, symbol.split()))
        if symbol[0].isalpha():
            pattern = rf"(?<!\w){pattern}(?!\w)"
        found = re.search(pattern, without_comments)
        if found is None:
            return
        for new in replacements.get(symbol, ()):
            yield Edit(start + found.start(), start + found.end(), new)


def imported_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that imports bind to modules. In `from x import y`, a lower-case y counts as one."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name for alias in node.names}
            names |= set(filter(str.islower, bound))
    return frozenset(names)


def parameter_names(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters, without self, cls and ctx."""
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [parameter.arg for parameter in parameters if parameter.arg not in IMPLICIT_ARGUMENTS]


def assigned_names(function: ast.FunctionDef) -> list[str]:
    """Return the names that a function assigns, in the order of ast.walk."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]

"""The text of a file with its syntax tree, and edits of spans of the text."""

import ast
import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from config import ConfigError

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
    parents: dict[ast.AST, ast.AST]  # node -> the node that it is a child of

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
            parents={child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)},
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

    def get_text(self, node: Node) -> str:
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
        text = self.get_text(node)
        return text if isinstance(node, ATOMS) else f"({text})"

    def replace_operand(self, node: Node, new: str) -> Edit:
        """Replace an expression, parenthesized where it is an operand."""
        is_operand = isinstance(self.parents[node], ast.expr)
        is_atom = isinstance(ast.parse(new, mode="eval").body, ATOMS)
        return self.replace(node, f"({new})" if is_operand and not is_atom else new)

    def statement_of(self, node: Node) -> ast.stmt | None:
        """Return the statement that a node is, or that consists of it alone, else None."""
        if node in self.statement_calls:
            return self.parents[node]
        return node if isinstance(node, ast.stmt) else None

    def join(self, edits: Sequence[Edit]) -> Edit:
        """Return several edits as one. Raises ConfigError if they overlap."""
        ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
        start = ordered[0].start
        parts = []
        position = start
        for edit in ordered:
            if edit.start < position:
                raise ConfigError(f"two changes of `{self.text[edit.start : edit.end]}`")
            parts += [self.text[position : edit.start], edit.new]
            position = edit.end
        return Edit(start, position, "".join(parts))

    def swap(self, left: Node, right: Node) -> Edit:
        """Two nodes change places, of which `left` comes first."""
        left_end = self.span(left)[1]
        right_start = self.span(right)[0]
        between = self.text[left_end:right_start]
        new = self.get_text(right) + between + self.get_text(left)
        return Edit(self.span(left)[0], self.span(right)[1], new)

    # ---- leaving something out ----------------------------------------------------------------------------

    def drop(self, node: Node) -> Edit:
        """Leave out a statement, an argument, an element, a filter or an operand.

        Raises ConfigError for anything else.
        """
        statement = self.statement_of(node)
        if statement is not None:
            return self.replace(statement, "pass")
        parent = self.parents[node]
        if isinstance(parent, ast.keyword):
            node, parent = parent, self.parents[parent]
        is_callee = isinstance(parent, ast.Call) and node is parent.func
        if isinstance(parent, (ast.Call, ast.Tuple, ast.List, ast.Dict)) and not is_callee:
            return self.drop_item(parent, node)
        if isinstance(parent, ast.comprehension):
            start = self.text.rindex("if", 0, self.span(node)[0])
            return Edit(start, self.span(node)[1], "")
        if isinstance(parent, ast.BoolOp):
            return self.drop_condition(parent, node)
        if isinstance(parent, ast.BinOp):
            return self.replace(parent, self.operand(parent.right if node is parent.left else parent.left))
        raise ConfigError(f"`{self.get_text(node)}` is nothing that can be left out")

    def drop_item(self, whole: ast.expr, item: Node) -> Edit:
        """Leave out an argument of a call, or an element of a tuple, list or dict, with its comma."""
        spans = self.item_spans(whole)
        position = next(at for at, (start, end) in enumerate(spans) if start <= self.span(item)[0] < end)
        start, end = spans[position]
        if isinstance(whole, ast.Tuple) and len(spans) == 2:  # (x) would be x
            kept = slice(*spans[1 - position])
            return Edit(spans[0][0], spans[1][1], f"{self.text[kept]},")
        if position > 0:  # with the comma before it
            return Edit(spans[position - 1][1], end, "")
        if len(spans) > 1:  # with the comma after it
            return Edit(start, spans[1][0], "")
        return Edit(start, end, "")

    def item_spans(self, whole: ast.expr) -> list[tuple[int, int]]:
        """Return the start and end offsets of the arguments or elements of an expression, sorted."""
        if isinstance(whole, ast.Dict):
            spans = []
            for key, value in zip(whole.keys, whole.values):
                start, end = self.span(value)
                first = self.span(key)[0] if key else self.text.rindex("**", 0, start)
                spans.append((first, end))
            return spans
        items = [*whole.args, *whole.keywords] if isinstance(whole, ast.Call) else whole.elts
        return sorted(map(self.span, items))

    def drop_condition(self, node: ast.BoolOp, condition: ast.expr) -> Edit:
        """`a and b and c` without one of them."""
        kept = [self.operand(value) for value in node.values if value is not condition]
        joined = f" {'and' if isinstance(node.op, ast.And) else 'or'} ".join(kept)
        return self.replace(node, f"({joined})" if len(kept) > 1 else joined)

    def append_argument(self, call: ast.Call, new: str) -> Edit:
        """Add an argument to a call, after all others."""
        spans = self.item_spans(call)
        if spans:
            return Edit(spans[-1][1], spans[-1][1], f", {new}")
        end = self.span(call)[1] - 1
        return Edit(end, end, new)

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


def dedent_rest(text: str, columns: int) -> str:
    """Return the text of a node with its lines after the first moved left by this many columns."""
    first, *rest = text.split("\n")
    moved = [re.sub(rf"^ {{0,{columns}}}", "", line) for line in rest]
    return "\n".join([first, *moved])


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

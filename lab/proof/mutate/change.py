"""A change of one place of the sources, as planted bugs (table.yaml) and equivalent mutants (equivalent.yaml)
are written.

A place is a file and the qualified name of a function or class in it (`Bucket.owners`); a file alone is all
of it. In a place, a target is a short piece of Python that is compared as a syntax tree, so comments, quotes
and line breaks do not matter. `...` in a target matches anything, and `_` marks the part that is meant if it
is not the whole:

    mesh.tp                     the attribute
    range(...)                  a call of range
    range(_, ...)               its first argument
    bias=_                      the value of a keyword argument, or what is assigned to a variable
    for layer in _: ...         what a loop runs over
    return _                    what is returned

The kinds of change, each a function below:

    replace: {TARGET: CODE}     the code takes the target's position; `it` in the code is the target
    drop: TARGET                a statement does nothing; an argument, element, operand or filter is left out
    append: {TARGET: CODE}      a call gets one more argument
    swap: {TARGET: TARGET}      two expressions or statements change places

A target must be found once. With `which: N` it is the N-th one of the place, with `which: all` each of them.
"""

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError
from lab.proof.mutate.source import Edit, Node, Source, dedent_rest

MARK = "_"
ORIGINAL = "it"
NOT_COMPARED = ("ctx", "kind", "type_comment", "type_params")
EVERY = "all"


@dataclass(frozen=True)
class PlacedChange:
    """A change of one place of `file`: {kind: its targets, with their code}.

    `within` is a qualified name, "" for the whole file. `which` is the number of the target among several,
    EVERY for each, "" if there is one.
    """

    file: str
    within: str
    kinds: Mapping[str, str | Mapping[str, str]]
    which: str = ""

    @staticmethod
    def from_entry(entry: Mapping, others: Sequence[str]) -> "PlacedChange":
        """Return the change of an entry of a YAML file: its `place`, `which` and kinds.

        Raises ConfigError if it has none of the kinds, or keys besides these and the `others`.
        """
        unknown = sorted(entry.keys() - {"place", "which", *KINDS, *others})
        if unknown:
            raise ConfigError(f"{entry}: unknown key {unknown[0]}")
        file, _, within = entry["place"].partition(" ")
        kinds = {kind: entry[kind] for kind in KINDS if kind in entry}
        if not kinds:
            raise ConfigError(f"{entry}: no change; one of {', '.join(KINDS)} says it")
        return PlacedChange(file, within, kinds, entry.get("which", ""))

    def edit(self, source: Source) -> Edit:
        """Return the change as one edit of the source of `file`.

        Raises ConfigError, which names the place and the target, unless every target is found.
        """
        try:
            places = definitions(source.tree, self.within) if self.within else [source.tree]
            if not places:
                raise ConfigError("there is no such function or class")
            find = Finder(source, places, self.which)
            edits = [edit for kind, given in self.kinds.items() for edit in KINDS[kind](given, find)]
        except ConfigError as error:
            raise ConfigError(f"{self.file} {self.within}: {error}") from None
        return source.join(edits)


def read_source(root: Path, file: str) -> Source:
    """Parse a file of a checkout. Raises ConfigError if there is none."""
    if not (root / file).is_file():
        raise ConfigError(f"{file}: there is no such file")
    return Source.parse((root / file).read_text())


# ---- places ------------------------------------------------------------------------------------------------


def definitions(tree: ast.AST, qualified_name: str) -> list[ast.AST]:
    """Return the functions and classes of this name, of which overloads have several."""
    found = [tree]
    for name in qualified_name.split("."):
        found = [inner for outer in found for inner in definitions_in(outer) if inner.name == name]
    return found


def definitions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the functions and classes that a node defines, also under a condition."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child
        else:
            yield from definitions_in(child)


@dataclass(frozen=True)
class Finder:
    """Finds the targets of a change."""

    source: Source
    places: Sequence[ast.AST]
    which: str

    def all(self, target: str) -> list[Node]:
        """Return the nodes that a target names, one unless `which` is EVERY.

        Raises ConfigError if there are none, or several without `which`.
        """
        pattern = parse_target(target)
        nodes = [node for place in self.places for node in ast.walk(place)]
        matched = [marked for node in nodes if (marked := match(pattern, node)) is not None]
        found = sorted((marked[0] for marked in matched), key=self.source.span)
        if not found:
            raise ConfigError(f"has no `{target}`")
        if self.which == EVERY:
            return found
        if self.which:
            number = int(self.which)
            if number > len(found):
                raise ConfigError(f"has only {len(found)} of `{target}`, and not {number}")
            return [found[number - 1]]
        if len(found) > 1:
            lines = ", ".join(str(node.lineno) for node in found)
            raise ConfigError(
                f"has {len(found)} of `{target}`, in lines {lines}; `which: N` or `which: all` says which"
            )
        return found

    def one(self, target: str) -> Node:
        """Return the node that a target names. Raises ConfigError as all()."""
        return self.all(target)[0]


# ---- targets -----------------------------------------------------------------------------------------------


def parse_target(target: str) -> ast.AST:
    """Return the syntax tree of a target: a statement, or the expression that it consists of."""
    try:
        statements = ast.parse(target).body
    except SyntaxError:
        statements = []
    if len(statements) != 1:
        raise ConfigError(f"`{target}` is not one expression or statement of Python")
    statement = statements[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def match(pattern: object, node: object) -> list[Node] | None:
    """Return the nodes that a pattern means if it matches the node, else None.

    The marked ones come first, and then the whole.
    """
    marked = match_value(pattern, node)
    return None if marked is None else [*marked, node]


def match_value(pattern: object, node: object) -> list[Node] | None:
    """Return the marked nodes if the pattern matches, else None."""
    if is_anything(pattern):
        return []
    if isinstance(pattern, ast.Name) and pattern.id == MARK:
        return [node] if isinstance(node, ast.AST) else None
    if isinstance(pattern, list):
        return match_list(pattern, node)
    if not isinstance(pattern, ast.AST):
        return [] if type(pattern) is type(node) and pattern == node else None
    if isinstance(pattern, ast.Assign) and isinstance(node, ast.keyword):
        is_named_so = getattr(pattern.targets[0], "id", None) == node.arg
        return match_value(pattern.value, node.value) if is_named_so else None
    if type(pattern) is not type(node):
        return None
    if isinstance(pattern, ast.Call):
        return match_call(pattern, node)
    fields = [field for field in pattern._fields if field not in NOT_COMPARED]
    if not getattr(pattern, "orelse", True):  # an `else` need not be named
        fields.remove("orelse")
    return joined(match_value(getattr(pattern, field), getattr(node, field)) for field in fields)


def match_list(patterns: list, nodes: list) -> list[Node] | None:
    """Match a list, in which `...` stands for any number of elements."""
    if not patterns:
        return None if nodes else []
    first, *rest = patterns
    if is_anything(first):
        tails = (match_list(rest, nodes[skipped:]) for skipped in range(len(nodes) + 1))
        return next((marked for marked in tails if marked is not None), None)
    if not nodes:
        return None
    return joined((match_value(first, nodes[0]), match_list(rest, nodes[1:])))


def match_call(pattern: ast.Call, call: ast.Call) -> list[Node] | None:
    """Match a call. With `...` among its arguments, the pattern need not have all keyword arguments."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    wanted = {keyword.arg: keyword.value for keyword in pattern.keywords}
    is_open = any(map(is_anything, pattern.args))
    if not wanted.keys() <= given.keys() or (wanted.keys() != given.keys() and not is_open):
        return None
    keywords = [match_value(value, given[name]) for name, value in wanted.items()]
    return joined([match_value(pattern.func, call.func), match_list(pattern.args, call.args), *keywords])


def joined(parts: Iterator | Sequence) -> list[Node] | None:
    """Return all marked nodes of the parts, or None if one of them does not match."""
    marked = []
    for part in parts:
        if part is None:
            return None
        marked += part
    return marked


def is_anything(pattern: object) -> bool:
    """Return whether a pattern is `...`, as an expression or a statement."""
    if isinstance(pattern, ast.Expr):
        pattern = pattern.value
    return isinstance(pattern, ast.Constant) and pattern.value is ...


# ---- kinds -------------------------------------------------------------------------------------------------


def replace(given: Mapping[str, str], find: Finder) -> Iterator[Edit]:
    """The code takes the target's position."""
    for target, code in given.items():
        for node in find.all(target):
            yield replace_node(node, code, find.source)


def drop(target: str, find: Finder) -> Iterator[Edit]:
    """A statement does nothing; an argument, element, operand or filter is left out."""
    for node in find.all(target):
        yield find.source.drop(node)


def append(given: Mapping[str, str], find: Finder) -> Iterator[Edit]:
    """A call gets one more argument."""
    for target, code in given.items():
        for call in find.all(target):
            yield find.source.append_argument(call, code)


def swap(given: Mapping[str, str], find: Finder) -> Iterator[Edit]:
    """Two expressions or statements change places."""
    for target, other in given.items():
        nodes = [find.one(target), find.one(other)]
        wholes = [find.source.statement_of(node) or node for node in nodes]
        yield find.source.swap(*sorted(wholes, key=find.source.span))


KINDS: dict[str, Callable[..., Iterator[Edit]]] = {
    kind.__name__: kind for kind in (replace, drop, append, swap)
}


# ---- the code of a replacement -----------------------------------------------------------------------------


def replace_node(node: Node, code: str, source: Source) -> Edit:
    """Return the edit that puts code in the position of a node."""
    if isinstance(node, ast.keyword):
        return source.replace(node, code)
    try:
        statements = ast.parse(code).body
    except SyntaxError:
        return source.replace(node, code)  # a slice, which is Python only in an index
    is_expression = len(statements) == 1 and isinstance(statements[0], ast.Expr)
    statement = source.statement_of(node)
    if is_expression and not isinstance(node, ast.stmt):
        return source.replace_operand(node, with_original(code, source.operand(node)))
    if statement is None:
        raise ConfigError(f"`{code}` is no expression, and what it would replace is part of a statement")

    original = dedent_rest(source.get_text(statement), statement.col_offset)
    lines = [with_original(ast.get_source_segment(code, line), original) for line in statements]
    indented = textwrap.indent("\n".join(lines), " " * statement.col_offset)
    return source.replace(statement, indented.lstrip(" "))


def with_original(code: str, original: str) -> str:
    """Return the code with the original text in the positions of the name `it`."""
    source = Source.parse(code)
    names = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == ORIGINAL]
    for name in sorted(names, key=source.span, reverse=True):
        is_statement = name in source.statement_calls
        text = original.replace("\n", "\n" + " " * name.col_offset) if is_statement else original
        code = source.replace(name, text).apply_to(code)
    return code

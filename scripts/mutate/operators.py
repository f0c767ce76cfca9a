"""What a mutant can be: small functions over a syntax tree, each of which finds edits of one kind in one
node.

An operator takes (node, Source) and yields Edits: spans of the text and what stands there instead, so
that the rest of the file, comments included, stays as it was and a mutant is a difference of a line or
two. The kinds are those of the mutation testing literature (Offutt et al. 1996, "An experimental
determination of sufficient mutant operators": relations, arithmetic, logic, signs, constants) and those
of faults that training code has shipped: a missing wait, a wrong axis, a wrong group of ranks, a dropped
call, swapped arguments.
"""

import ast
from collections.abc import Callable, Iterator

from scripts.mutate.source import Edit, Source

RELATIONS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
}
ARITHMETIC = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/", "+"),
    "/": ("*",),
    "//": ("%", "/"),
    "%": ("//",),
    "**": ("*",),
    "|": ("&",),
    "&": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
    "^": ("|",),
}
UPDATES = {
    "+=": ("-=", "="),
    "-=": ("+=", "="),
    "*=": ("/=", "="),
    "/=": ("*=", "="),
    "//=": ("*=",),
    "|=": ("=",),
    "&=": ("=",),
}
WAITS = ("wait", "land", "finish", "arrived", "join", "synchronize", "settle")
OTHER_KIND = (
    "len",
    "range",
    "zip",
    "enumerate",
    "isinstance",
    "open",
    "getattr",
    "hasattr",
    "super",
    "str",
    "item",
    "tolist",
    "getsize",
)
AXES = ("dim", "axis", "dims")
WITH_AXIS = {
    "sum": 0,
    "mean": 0,
    "max": 0,
    "min": 0,
    "argmax": 0,
    "any": 0,
    "all": 0,
    "cumsum": 0,
    "softmax": 0,
    "logsumexp": 0,
    "amax": 0,
    "squeeze": 0,
    "unsqueeze": 0,
    "transpose": 0,
    "movedim": 0,
    "flatten": 0,
    "unflatten": 0,
    "chunk": 1,
    "split": 1,
    "size": 0,
    "select": 0,
    "narrow": 0,
    "flip": 0,
    "sort": 0,
    "argsort": 0,
    "cat": 1,
    "stack": 1,
    "gather": 0,
    "index_select": 0,
    "index_add_": 0,
    "scatter_": 0,
    "roll": 1,
    "unbind": 0,
    "norm": 1,
}  # which argument is an axis
GROUPS = (
    "tp",
    "cp",
    "pp",
    "dp_rep",
    "data",
    "shard",
    "loss",
    "model",
    "stage",
    "world",
    "tokens",
    "experts",
    "eshard",
    "eloss",
    "emodel",
)


Operator = Callable[[ast.AST, Source], Iterator[Edit]]
SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitOr: "|",
    ast.BitAnd: "&",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitXor: "^",
    ast.And: "and",
    ast.Or: "or",
}


def is_text(node: ast.AST) -> bool:
    """Whether an expression is a string: a sum of strings is no arithmetic."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return (
        isinstance(node, ast.JoinedStr)
        or isinstance(node, ast.Constant)
        and isinstance(node.value, (str, bytes))
    )


def constants(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Another number or truth value."""
    if not isinstance(node, ast.Constant):
        return
    v = node.value
    if isinstance(v, bool):
        yield source.instead(node, str(not v))
    elif isinstance(v, int):
        new = {v + 1, v - 1} | ({2 * v, v // 2} if v > 2 else set()) | ({0} if v else set())
        yield from (source.instead(node, str(n) if n >= 0 else f"({n})") for n in sorted(new - {v}))
    elif isinstance(v, float):
        yield from (source.instead(node, repr(n)) for n in ((2 * v, v / 2) if v else (1.0,)))


def relations(node: ast.AST, source: Source) -> Iterator[Edit]:
    """< becomes <= or >=, == becomes !=, ..."""
    if isinstance(node, ast.Compare):
        for left, sign, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            yield from source.between(left, right, RELATIONS, SIGNS[type(sign)])


def arithmetic(node: ast.AST, source: Source) -> Iterator[Edit]:
    """+ becomes -, * becomes /, // becomes %, ..."""
    if isinstance(node, ast.BinOp) and not is_text(node) and type(node.op) in SIGNS:
        yield from source.between(node.left, node.right, ARITHMETIC, SIGNS[type(node.op)])


def updates(node: ast.AST, source: Source) -> Iterator[Edit]:
    """+= becomes -=, or = : what was summed up is overwritten."""
    if isinstance(node, ast.AugAssign) and not is_text(node.value) and type(node.op) in SIGNS:
        yield from source.between(node.target, node.value, UPDATES, SIGNS[type(node.op)] + "=")


def signs(node: ast.AST, source: Source) -> Iterator[Edit]:
    """-x becomes x, not x becomes x, ~x becomes x."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        yield source.instead(node, source.operand(node.operand))


def dropped_term(node: ast.AST, source: Source) -> Iterator[Edit]:
    """a + b becomes a or b, a * b becomes a or b, a / b becomes a."""
    if isinstance(node, ast.BinOp) and not is_text(node):
        yield source.instead(node, source.operand(node.left))
        if isinstance(node.op, (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)):
            yield source.instead(node, source.operand(node.right))


def dropped_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """`a and b` becomes a or b."""
    if isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            kept = [source.operand(v) for v in node.values[:i] + node.values[i + 1 :]]
            yield source.instead(
                node, f"({f' {SIGNS[type(node.op)]} '.join(kept)})" if len(kept) > 1 else kept[0]
            )


def and_or(node: ast.AST, source: Source) -> Iterator[Edit]:
    """and becomes or, or becomes and."""
    if isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:]):
            yield from source.between(left, right, {"and": ("or",), "or": ("and",)}, SIGNS[type(node.op)])


def missing_wait(node: ast.AST, source: Source) -> Iterator[Edit]:
    """x.wait() becomes x, or nothing where it is a statement."""
    if isinstance(node, ast.Expr):
        if called(node.value) in WAITS:
            yield source.instead(node, "pass")
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WAITS
        and node not in source.alone
    ):
        yield source.instead(node, source.operand(node.func.value))


def dropped_statement(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A statement that is a call becomes pass."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield source.instead(node, "pass")


def dropped_assignment(node: ast.AST, source: Source) -> Iterator[Edit]:
    """x.a = y, x[i] = y and x += y become pass."""
    kept = (
        isinstance(node, ast.AugAssign)
        or isinstance(node, ast.Assign)
        and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    )
    if kept:
        yield source.instead(node, "pass")


def dropped_call(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(x, ...) becomes x; x.f(...) becomes x where x is no module. What makes an object, or a value of
    another kind, stays: a mutant that fails at once tells nothing of the tests."""
    if (
        not isinstance(node, ast.Call)
        or node in source.alone
        or called(node)[:1].isupper()
        or called(node) in OTHER_KIND
    ):
        return
    if node.args and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        yield source.instead(node, source.operand(node.args[0]))
    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    if (
        of is not None
        and called(node) not in WAITS
        and not (isinstance(of, ast.Name) and of.id in source.modules | {"torch", "self"})
    ):
        yield source.instead(node, source.operand(of))


def dropped_keyword(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(x, k=v) becomes f(x)."""
    if isinstance(node, ast.Call):
        every = sorted([*node.args, *(k for k in node.keywords)], key=source.span)
        for one in (k for k in node.keywords if k.arg):
            at = every.index(one)
            if at:
                yield Edit(source.span(every[at - 1])[1], source.span(one)[1], "")
            elif len(every) > 1:
                yield Edit(source.span(one)[0], source.span(every[1])[0], "")
            else:
                yield source.instead(one, "")


def swapped_arguments(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(a, b) becomes f(b, a): two neighbours of the arguments given by place."""
    if isinstance(node, ast.Call):
        plain = [a for a in node.args if not isinstance(a, (ast.Starred, ast.GeneratorExp))]
        for left, right in zip(plain, plain[1:]):
            (a, b), (c, d) = source.span(left), source.span(right)
            if source.of(left) != source.of(right):
                yield Edit(a, d, source.text[c:d] + source.text[b:c] + source.text[a:b])


def off_by_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The ends of slices and ranges, and indices that are sums, moved by one."""
    ends: list[ast.expr] = []
    if isinstance(node, ast.Slice):
        ends = [e for e in (node.lower, node.upper) if e is not None and not isinstance(e, ast.Constant)]
        if node.lower is None and node.step is None:
            start = source.span(node)[0]
            yield Edit(start, start, "1")
    elif isinstance(node, ast.Call) and called(node) == "range":
        ends = [e for e in node.args[:2] if not isinstance(e, (ast.Constant, ast.Starred))]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.BinOp):
        ends = [node.slice]
    for end in ends:
        yield source.instead(end, f"{source.operand(end)} + 1")
        yield source.instead(end, f"{source.operand(end)} - 1")


def wrong_axis(node: ast.AST, source: Source) -> Iterator[Edit]:
    """dim=-1 becomes 0, 0 becomes 1, 1 becomes 0, 2 becomes 1."""
    if not isinstance(node, ast.Call):
        return
    axes = [k.value for k in node.keywords if k.arg in AXES]
    first = WITH_AXIS.get(called(node))
    if first is not None:
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        ):
            first = max(first, 1)
        axes += node.args[first : first + 2]
    for axis in axes:
        if (old := number(axis)) is not None:
            yield source.instead(axis, {-1: "0", 0: "1", 1: "0", 2: "1", -2: "-1"}.get(old, "0"))


def wrong_group(node: ast.AST, source: Source) -> Iterator[Edit]:
    """mesh.tp becomes mesh.cp: an exchange over other ranks."""
    if isinstance(node, ast.Attribute) and node.attr in GROUPS and isinstance(node.ctx, ast.Load):
        of = node.value
        if "mesh" in (getattr(of, "id", ""), getattr(of, "attr", "")):
            yield from (
                source.instead(node, f"{source.of(of)}.{other}") for other in GROUPS if other != node.attr
            )


def condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """if c becomes if not c, in statements, expressions, loops and filters."""
    tests = (
        [node.test]
        if isinstance(node, (ast.If, ast.IfExp, ast.While))
        else node.ifs
        if isinstance(node, ast.comprehension)
        else []
    )
    for test in tests:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            continue  # signs() does this
        yield source.instead(test, f"(not {source.operand(test)})")


def dropped_branch(node: ast.AST, source: Source) -> Iterator[Edit]:
    """`else:` does nothing; `a if c else b` becomes a or b; a filter lets all pass."""
    if (
        isinstance(node, ast.If)
        and node.orelse
        and not source.text[source.span(node.orelse[0])[0] :].startswith("elif")
    ):
        yield Edit(source.span(node.orelse[0])[0], source.span(node.orelse[-1])[1], "pass")
    elif isinstance(node, ast.IfExp):
        yield source.instead(node, source.operand(node.body))
        yield source.instead(node, source.operand(node.orelse))
    elif isinstance(node, ast.comprehension):
        yield from (source.instead(test, "True") for test in node.ifs)


def other_name(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Another name of the function is returned."""
    if isinstance(node, ast.Return) and node.value is not None and node in source.around:
        given = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for value in (v for v in given if isinstance(v, ast.Name)):
            others = [n for n in source.names[source.around[node]] if n != value.id]
            yield from (source.instead(value, other) for other in others)


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    f = node.func if isinstance(node, ast.Call) else None
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def number(node: ast.AST) -> int | None:
    """A whole number as it is written, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return None if (n := number(node.operand)) is None else -n
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


OPERATORS: dict[str, Operator] = {
    f.__name__: f
    for f in (
        constants,
        relations,
        arithmetic,
        updates,
        signs,
        dropped_term,
        dropped_condition,
        and_or,
        missing_wait,
        dropped_statement,
        dropped_assignment,
        dropped_call,
        dropped_keyword,
        swapped_arguments,
        off_by_one,
        wrong_axis,
        wrong_group,
        condition,
        dropped_branch,
        other_name,
    )
}

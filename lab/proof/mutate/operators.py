"""The mutation operators: each is a function that finds edits of one kind in one node of a syntax tree.

An operator takes (node, Source) and yields Edits. An edit replaces a span of the text, so the rest of the
file stays as it is, including comments, and the diff of a mutant is one or two lines. The kinds are those of
the mutation testing literature (Offutt et al. 1996, "An experimental determination of sufficient mutant
operators": relations, arithmetic, logic, signs, constants) and typical bugs of published training code: a
missing wait, a wrong axis, a wrong process group, a dropped call, swapped arguments.

The name of an operator function is recorded in the file of verdicts.
"""

import ast
from collections.abc import Callable, Iterator

from lab.proof.mutate.source import Edit, Source
from parallel.topology.dims import GROUP_AXES

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
LOGIC = {"and": ("or",), "or": ("and",)}

# Functions and methods that block until something has finished.
WAIT_CALLS = (
    "wait",
    "continue_reduce",
    "wait_reduce_scatter",
    "finish",
    "finish_reduce",
    "finish_grad_reductions",
    "wait_arrival",
    "wait_unshard",
    "wait_received",
    "join",
    "synchronize",
    "resolve_error_feedback",
    "update_after_step",
)

# Calls that change the type of their argument: dropping one crashes immediately.
KIND_CHANGING_CALLS = (
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

AXIS_KEYWORDS = ("dim", "axis", "dims")
OTHER_AXIS = {-1: "0", 0: "1", 1: "0", 2: "1", -2: "-1"}

# Tensor methods with an axis argument: its position.
AXIS_POSITION = {
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
}

Operator = Callable[[ast.AST, Source], Iterator[Edit]]

SYMBOLS = {
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


# ---- numbers, relations, arithmetic, logic -----------------------------------------------------------------


def constants(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Another number or truth value."""
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield source.replace(node, str(not value))
    elif isinstance(value, int):
        for other in other_integers(value):
            yield source.replace(node, str(other) if other >= 0 else f"({other})")
    elif isinstance(value, float):
        others = (2 * value, value / 2) if value else (1.0,)
        for other in others:
            yield source.replace(node, repr(other))


def other_integers(value: int) -> list[int]:
    """Return value + 1, value - 1 and 0, and for values above 2 also double and half."""
    others = {value + 1, value - 1, 0}
    if value > 2:
        others |= {2 * value, value // 2}
    return sorted(others - {value})


def relations(node: ast.AST, source: Source) -> Iterator[Edit]:
    """< becomes <= or >=, == becomes !=, ..."""
    if not isinstance(node, ast.Compare):
        return
    left_sides = [node.left, *node.comparators]
    for left, operator, right in zip(left_sides, node.ops, node.comparators):
        yield from source.replace_symbol(left, right, RELATIONS, SYMBOLS[type(operator)])


def arithmetic(node: ast.AST, source: Source) -> Iterator[Edit]:
    """+ becomes -, * becomes /, // becomes %, ..."""
    if not isinstance(node, ast.BinOp) or is_text(node):
        return
    symbol = SYMBOLS.get(type(node.op))
    if symbol is not None:
        yield from source.replace_symbol(node.left, node.right, ARITHMETIC, symbol)


def updates(node: ast.AST, source: Source) -> Iterator[Edit]:
    """+= becomes -= or =, which overwrites the running sum."""
    if not isinstance(node, ast.AugAssign) or is_text(node.value):
        return
    symbol = SYMBOLS.get(type(node.op))
    if symbol is not None:
        yield from source.replace_symbol(node.target, node.value, UPDATES, symbol + "=")


def signs(node: ast.AST, source: Source) -> Iterator[Edit]:
    """-x becomes x, not x becomes x, ~x becomes x."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        yield source.replace(node, source.operand(node.operand))


def dropped_term(node: ast.AST, source: Source) -> Iterator[Edit]:
    """a + b becomes a or b, a * b becomes a or b, a / b becomes a."""
    if not isinstance(node, ast.BinOp) or is_text(node):
        return
    yield source.replace(node, source.operand(node.left))
    if isinstance(node.op, (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)):
        yield source.replace(node, source.operand(node.right))


def dropped_condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """`a and b` becomes a or b."""
    if not isinstance(node, ast.BoolOp):
        return
    for condition in node.values:
        yield source.drop_condition(node, condition)


def and_or(node: ast.AST, source: Source) -> Iterator[Edit]:
    """and becomes or, or becomes and."""
    if not isinstance(node, ast.BoolOp):
        return
    symbol = SYMBOLS[type(node.op)]
    for left, right in zip(node.values, node.values[1:]):
        yield from source.replace_symbol(left, right, LOGIC, symbol)


# ---- statements and calls ----------------------------------------------------------------------------------


def missing_wait(node: ast.AST, source: Source) -> Iterator[Edit]:
    """x.wait() becomes x, or `pass` as a statement."""
    if isinstance(node, ast.Expr):
        if called_name(node.value) in WAIT_CALLS:
            yield source.replace(node, "pass")
        return
    if not isinstance(node, ast.Call) or node in source.statement_calls:
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr in WAIT_CALLS:
        yield source.replace(node, source.operand(node.func.value))


def dropped_statement(node: ast.AST, source: Source) -> Iterator[Edit]:
    """A call statement becomes `pass`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield source.replace(node, "pass")


def dropped_assignment(node: ast.AST, source: Source) -> Iterator[Edit]:
    """x.a = y, x[i] = y and x += y become `pass`."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
        return
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        yield source.replace(node, "pass")


def dropped_call(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(x, ...) becomes x; x.f(...) becomes x unless x is a module.

    Constructors and calls that change the type are kept: a mutant that crashes immediately says nothing about
    the tests.
    """
    if not isinstance(node, ast.Call) or node in source.statement_calls:
        return
    name = called_name(node)
    if name[:1].isupper() or name in KIND_CHANGING_CALLS:
        return

    if node.args and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        yield source.replace(node, source.operand(node.args[0]))

    if not isinstance(node.func, ast.Attribute) or name in WAIT_CALLS:
        return
    receiver = node.func.value
    is_module = isinstance(receiver, ast.Name) and receiver.id in source.modules | {"torch", "self"}
    if not is_module:
        yield source.replace(node, source.operand(receiver))


def dropped_keyword(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(x, k=v) becomes f(x)."""
    if not isinstance(node, ast.Call):
        return
    for argument in sorted(node.keywords, key=source.span):
        if argument.arg is not None:  # else **arguments
            yield source.drop_item(node, argument)


def swapped_arguments(node: ast.AST, source: Source) -> Iterator[Edit]:
    """f(a, b) becomes f(b, a): two adjacent positional arguments are swapped."""
    if not isinstance(node, ast.Call):
        return
    positional = [value for value in node.args if not isinstance(value, (ast.Starred, ast.GeneratorExp))]
    for left, right in zip(positional, positional[1:]):
        if source.get_text(left) != source.get_text(right):
            yield source.swap(left, right)


# ---- indices, axes, process groups -------------------------------------------------------------------------


def off_by_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Slice bounds, range bounds and indices that are sums change by one."""
    bounds: list[ast.expr] = []
    if isinstance(node, ast.Slice):
        given = [bound for bound in (node.lower, node.upper) if bound is not None]
        bounds = [bound for bound in given if not isinstance(bound, ast.Constant)]
        if node.lower is None and node.step is None:
            start = source.span(node)[0]
            yield Edit(start, start, "1")
    elif isinstance(node, ast.Call) and called_name(node) == "range":
        bounds = [bound for bound in node.args[:2] if not isinstance(bound, (ast.Constant, ast.Starred))]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.BinOp):
        bounds = [node.slice]

    for bound in bounds:
        yield source.replace(bound, f"{source.operand(bound)} + 1")
        yield source.replace(bound, f"{source.operand(bound)} - 1")


def wrong_axis(node: ast.AST, source: Source) -> Iterator[Edit]:
    """dim=-1 becomes 0, 0 becomes 1, 1 becomes 0, 2 becomes 1."""
    if not isinstance(node, ast.Call):
        return
    axes = [keyword.value for keyword in node.keywords if keyword.arg in AXIS_KEYWORDS]
    position = AXIS_POSITION.get(called_name(node))
    if position is not None:
        if is_torch_function(node):  # its first argument is the tensor
            position = max(position, 1)
        axes += node.args[position : position + 2]

    for axis in axes:
        value = integer_value(axis)
        if value is not None:
            yield source.replace(axis, OTHER_AXIS.get(value, "0"))


def wrong_group(node: ast.AST, source: Source) -> Iterator[Edit]:
    """mesh.tp becomes mesh.cp: another process group."""
    if not isinstance(node, ast.Attribute) or node.attr not in GROUP_AXES:
        return
    if not isinstance(node.ctx, ast.Load):
        return
    mesh = node.value
    if "mesh" not in (getattr(mesh, "id", ""), getattr(mesh, "attr", "")):
        return
    for other in GROUP_AXES:
        if other != node.attr:
            yield source.replace(node, f"{source.get_text(mesh)}.{other}")


# ---- branches and results ----------------------------------------------------------------------------------


def condition(node: ast.AST, source: Source) -> Iterator[Edit]:
    """`if c` becomes `if not c`, in statements, expressions, loops and filters."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    else:
        return
    for test in tests:
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not is_negated:  # `not c` is left to signs()
            yield source.replace(test, f"(not {source.operand(test)})")


def dropped_branch(node: ast.AST, source: Source) -> Iterator[Edit]:
    """`else:` does nothing; `a if c else b` becomes a or b; a comprehension loses its filter."""
    if isinstance(node, ast.If) and node.orelse:
        start = source.span(node.orelse[0])[0]
        end = source.span(node.orelse[-1])[1]
        if not source.text.startswith("elif", start):
            yield Edit(start, end, "pass")
    elif isinstance(node, ast.IfExp):
        yield source.replace(node, source.operand(node.body))
        yield source.replace(node, source.operand(node.orelse))
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield source.replace(test, "True")


def other_name(node: ast.AST, source: Source) -> Iterator[Edit]:
    """The function returns another one of its local names."""
    if not isinstance(node, ast.Return) or node.value is None:
        return
    function = source.enclosing_function.get(node)
    if function is None:
        return
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for value in values:
        if not isinstance(value, ast.Name):
            continue
        for other in source.names_of_function[function]:
            if other != value.id:
                yield source.replace(value, other)


# ---- properties of nodes -----------------------------------------------------------------------------------


def is_text(node: ast.AST) -> bool:
    """Return whether an expression is a string: a sum of strings is not arithmetic."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    return isinstance(node, ast.JoinedStr)


def called_name(node: ast.AST) -> str:
    """Return the last name of the callee ("wait" for x.work.wait()), or "" if it has none."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_torch_function(call: ast.Call) -> bool:
    """Return whether a call is torch.f(...)."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
    )


def integer_value(node: ast.AST) -> int | None:
    """Return the value of an integer literal with its sign, or None for any other node."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer_value(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


OPERATORS: dict[str, Operator] = {
    operator.__name__: operator
    for operator in (
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

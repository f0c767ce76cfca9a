"""Determine which tensors a Triton kernel reads and writes from its source.

`tensors_used` tracks the pointers of a launch through the kernel and its helpers: from the parameters through
arithmetic, assignments and calls to `tl.load`, `tl.store`, descriptors and atomics. A branch on a number
fixed by the launch (a tl.constexpr) is taken as in this launch; for other branches both sides are followed.
So the result is exact unless the source selects tensors by values on the device.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

LOADS = {"load", "gather"}
STORES = {"store", "scatter"}
NO_POINTERS = {"dtype", "element_ty", "shape", "type", "strides", "block_shape"}  # of a pointer
UNKNOWN = object()

Names = frozenset[str]
NONE: Names = frozenset()


@dataclass
class TensorUse:
    """The kernel parameters whose tensors it loads from, and those that it stores to."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


def tensors_used(kernel: Any, numbers: Mapping[str, Any], pointers: Iterable[str]) -> TensorUse:
    """Return what a launch reads and writes.

    `numbers` are compiled into it (fixed_numbers). `pointers` are the parameters that are tensors, or
    descriptors of tensors.
    """
    use = TensorUse()
    origins = {name: frozenset([name]) for name in pointers}
    KernelWalk(plain_function(kernel), origins, dict(numbers), use).run()
    return use


def plain_function(kernel: Any) -> FunctionType:
    """Return the Python function of a kernel or a helper under `triton.jit`, compiled or interpreted."""
    function = getattr(kernel, "fn", kernel)
    while not isinstance(function, FunctionType):
        function = function.fn
    return function


def is_our_function(value: Any) -> bool:
    """Return whether it is a `triton.jit` helper, other than Triton's own, which receive no pointers."""
    function = getattr(value, "fn", None)
    return isinstance(function, FunctionType) and not function.__module__.startswith("triton.")


@functools.cache
def get_syntax(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names assigned by the statements."""
    names: set[str] = set()
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                names.add(part.id)
    return names


class KernelWalk:
    """One function, with the pointers that each name may come from, and known numbers."""

    def __init__(
        self, function: FunctionType, origins: dict[str, Names], numbers: dict[str, Any], use: TensorUse
    ) -> None:
        self.tree = get_syntax(function)
        self.globals = function.__globals__
        self.local_names = assigned_names(self.tree.body) | {arg.arg for arg in self.tree.args.args}
        self.origins = dict(origins)
        self.numbers = dict(numbers)
        self.use = use
        self.returned: Names = NONE

    def run(self) -> Names:
        """Return the pointers that the function's result may come from."""
        self.block(self.tree.body)
        return self.returned

    # ---- statements

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            name = node.target
            origins = self.expression(node.value)
            if isinstance(name, ast.Name):
                self.origins[name.id] = self.origins.get(name.id, NONE) | origins
                self.numbers.pop(name.id, None)
        elif isinstance(node, (ast.For, ast.While)):
            self.loop(node)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned |= self.expression(node.value)
        elif isinstance(node, ast.Expr):
            self.expression(node.value)
        elif isinstance(node, ast.With):
            self.block(node.body)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        both_are_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if both_are_tuples and len(target.elts) == len(value.elts):
            for one_target, one_value in zip(target.elts, value.elts):
                self.assign(one_target, one_value)
            return
        origins = self.expression(value)
        number = self.value(value)
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                self.origins[part.id] = origins
                self.numbers.pop(part.id, None)
        if isinstance(target, ast.Name) and number is not UNKNOWN:
            self.numbers[target.id] = number

    def loop(self, node: ast.For | ast.While) -> None:
        for name in assigned_names([node]):  # its value changes in each iteration
            self.numbers.pop(name, None)
        self.expression(node.iter if isinstance(node, ast.For) else node.test)
        self.block(node.body)
        self.block(node.body)  # includes pointers advanced by the first iteration

    def branch(self, node: ast.If) -> None:
        self.expression(node.test)
        test = self.value(node.test)
        if test is not UNKNOWN:
            self.block(node.body if test else node.orelse)
            return

        before = dict(self.origins)
        self.block(node.body)
        after_body, self.origins = self.origins, before
        self.block(node.orelse)
        for name, origins in after_body.items():
            self.origins[name] = self.origins.get(name, NONE) | origins
        for name in assigned_names([node]):
            self.numbers.pop(name, None)

    # ---- expressions: the pointers that a value may come from

    def expression(self, node: ast.AST | None) -> Names:
        if node is None:
            return NONE
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            return NONE if node.attr in NO_POINTERS else self.expression(node.value)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            if test is not UNKNOWN:
                return self.expression(node.body if test else node.orelse)
        found = NONE
        for child in ast.iter_child_nodes(node):
            found |= self.expression(child)
        return found

    def call(self, node: ast.Call) -> Names:
        positional = [self.expression(argument) for argument in node.args]
        keywords = {word.arg: self.expression(word.value) for word in node.keywords if word.arg}
        callee = self.value(node.func)
        if is_our_function(callee):
            return self.helper(callee, node, positional, keywords)

        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        through = self.expression(owner)  # a descriptor's load and store methods
        pointers = through or (positional[0] if positional else keywords.get("pointer", NONE))
        if method in LOADS or method in STORES or method.startswith("atomic"):
            if method not in STORES:
                self.use.read |= pointers
            if method not in LOADS:
                self.use.written |= pointers
            return NONE
        return frozenset().union(through, *positional, *keywords.values())

    def helper(
        self, helper: Any, node: ast.Call, positional: list[Names], keywords: dict[str, Names]
    ) -> Names:
        """Follow a call of another function under triton.jit, with everything known about its arguments."""
        function = plain_function(helper)
        names = [arg.arg for arg in get_syntax(function).args.args]
        given = {**dict(zip(names, positional)), **keywords}
        nodes = {**dict(zip(names, node.args)), **{word.arg: word.value for word in node.keywords}}
        defaults = inspect.signature(function).parameters.items()
        numbers = {name: one.default for name, one in defaults if one.default is not inspect.Parameter.empty}
        for name, argument in nodes.items():
            numbers.pop(name, None)
            number = self.value(argument)
            if number is not UNKNOWN:
                numbers[name] = number
        return KernelWalk(function, given, numbers, self.use).run()

    # ---- numbers fixed by the launch

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or UNKNOWN."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                is_known = part.id in self.numbers or part.id not in self.local_names
                if not is_known or self.origins.get(part.id):
                    return UNKNOWN
            elif isinstance(part, ast.Call):
                return UNKNOWN
        try:
            code = compile(ast.Expression(node), "<kernel>", "eval")
            return plain_value(eval(code, self.globals, self.numbers))
        except Exception:  # only the kernel compiler can evaluate it
            return UNKNOWN


def plain_value(value: Any) -> Any:
    """Unwrap the number in a tl.constexpr."""
    return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value


@functools.cache
def get_signature(function: FunctionType) -> inspect.Signature:
    return inspect.signature(function)


def bind_arguments(kernel: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind the arguments of a launch to the kernel's parameter names, without launch options."""
    signature = get_signature(plain_function(kernel))
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind_partial(*args, **known)
    bound.apply_defaults()
    return {name: plain_value(value) for name, value in bound.arguments.items()}


def fixed_numbers(kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are compiled into the kernel: tl.constexpr, and None for a missing tensor."""
    fixed = {}
    for name, parameter in get_signature(plain_function(kernel)).parameters.items():
        is_constexpr = "constexpr" in str(parameter.annotation)
        if name in arguments and (is_constexpr or arguments[name] is None):
            fixed[name] = arguments[name]
    return fixed

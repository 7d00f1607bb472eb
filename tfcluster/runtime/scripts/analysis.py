"""Static analysis of a program: finds out from its source how it trains. Pure.

The source is read before the program's first line runs, because later may be too late.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NAMES = (
    "DistributedOptimizer",
    "DistributedGradientTape",
    "PartialDistributedOptimizer",
    "PartialDistributedGradientTape",
)
"""Names with which a program that distributes its training exchanges its gradients."""

TF1_NAMES = (
    "ClusterSpec",
    "MonitoredTrainingSession",
    "Supervisor",
    "SyncReplicasOptimizer",
    "parameter_server_graph",
    "replica_device_setter",
    "replicated_graph",
)
"""Names with which a TensorFlow 1 script trains in a cluster."""

_PACKAGE = "tfcluster.runtime"
_HOROVOD = "horovod"
_WORDS = (_HOROVOD, "tfcluster", *TF1_NAMES)
"""A source with none of these words need not be parsed."""

_REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter")
_GRADIENTS = ("compute_gradients", "gradient", "gradients")
_UPDATES = ("apply", "apply_gradients", "set_weights")
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of analysing how a program trains."""

    distributes_itself: bool = False
    """The program exchanges gradients or weights by itself.

    It imports ``horovod`` at module level, or it imports ``tfcluster.runtime`` and
    either uses one of ``NAMES``, or passes the result of a reduction to an optimizer or
    variable. Averages of other values, such as a loss that is printed, do not count.
    """
    is_tf1_cluster_script: bool = False
    """The program uses one of ``TF1_NAMES``."""


def analyse(source: str) -> Analysis:
    """Parse a program's source once. A source that cannot be parsed says nothing."""
    if not any(word in source for word in _WORDS):
        return Analysis()
    try:
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        return Analysis(
            distributes_itself=_distributes_itself(tree, nodes),
            is_tf1_cluster_script=any(_uses(node, TF1_NAMES) for node in nodes),
        )
    except (SyntaxError, ValueError, RecursionError):
        return Analysis()


def _distributes_itself(tree: ast.Module, nodes: Sequence[ast.AST]) -> bool:
    if any(_imports(node, _HOROVOD) for node in _run_with_the_module(tree)):
        return True
    if not any(_imports_us(node) for node in nodes):
        return False
    return any(_names_one(node) for node in nodes) or _Reductions(tree).reach_weights()


def _run_with_the_module(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements at module level, including those in ``try`` blocks."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.Try):
            yield from _run_with_the_module(node)


def _imports(node: ast.AST, package: str) -> bool:
    """Whether a statement imports ``package`` or a module in it."""
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if not node.level else []
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        return False
    return any(name.split(".")[0] == package for name in names)


def _imports_us(node: ast.AST) -> bool:
    if _imports(node, _HOROVOD):
        return True
    if isinstance(node, ast.ImportFrom):
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return _PACKAGE in (node.module, *full)
    return isinstance(node, ast.Import) and any(
        alias.name == _PACKAGE for alias in node.names
    )


def _names_one(node: ast.AST) -> bool:
    return _uses(node, NAMES) or (isinstance(node, ast.alias) and node.name in NAMES)


def _uses(node: ast.AST, names: Sequence[str]) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in names) or (
        isinstance(node, ast.Name) and node.id in names
    )


@dataclass(slots=True)
class _Reductions:
    """Follows the results of reductions through names and functions."""

    tree: ast.Module
    returning: set[str] = field(default_factory=lambda: set(_REDUCTIONS))
    """Names of functions that return the result of a reduction."""

    def reach_weights(self) -> bool:
        """Whether such a result is applied as gradients or assigned as weights."""
        functions = [n for n in ast.walk(self.tree) if isinstance(n, _Function)]
        for alias in ast.walk(self.tree):
            if isinstance(alias, ast.alias) and alias.name in _REDUCTIONS:
                self.returning.add(alias.asname or alias.name)
        count = 0
        while count != len(self.returning):
            count = len(self.returning)
            for function in functions:
                if self._returns_one(function):
                    self.returning.add(function.name)
        scopes: list[ast.Module | _Function] = [self.tree, *functions]
        return any(self._applies_one(scope) for scope in scopes)

    def _returns_one(self, function: _Function) -> bool:
        names = self._names(function)
        return any(
            isinstance(node, ast.Return)
            and node.value is not None
            and self._is_one(node.value, names)
            for node in _own(function)
        )

    def _applies_one(self, scope: ast.Module | _Function) -> bool:
        names = self._names(scope)
        for node in _own(scope):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            ):
                continue
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if node.func.attr in _UPDATES:
                if any(self._is_one(value, names) for value in arguments):
                    return True
            elif node.func.attr in _ASSIGNMENTS and isinstance(
                node.func.value, ast.Name
            ):
                # A variable is assigned its own average: parameter averaging.
                own = node.func.value.id
                if any(self._reduces(value, own) for value in arguments):
                    return True
        return False

    def _names(self, scope: ast.Module | _Function) -> set[str]:
        """Names bound to the result of a reduction, or to a value computed from it."""
        names: set[str] = set()
        count = -1
        while count != len(names):
            count = len(names)
            for node in _own(scope):
                for target, value in _bindings(node):
                    if self._is_one(value, names):
                        names |= {
                            name.id
                            for name in ast.walk(target)
                            if isinstance(name, ast.Name)
                        }
        return names

    def _is_one(self, value: ast.expr, names: set[str]) -> bool:
        if isinstance(value, ast.Call) and _called(value) in _GRADIENTS:
            # The gradient of an averaged loss is still this rank's own gradient.
            return False
        if isinstance(value, ast.Call) and _called(value) in self.returning:
            return True
        if isinstance(value, ast.Name):
            return value.id in names
        return any(self._is_one(child, names) for child in _expressions(value))

    def _reduces(self, value: ast.expr, name: str) -> bool:
        return any(
            isinstance(node, ast.Call)
            and _called(node) in self.returning
            and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
            for node in ast.walk(value)
        )


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, except those of nested functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _Function):
            yield from _own(node)


def _expressions(value: ast.AST) -> Iterator[ast.expr]:
    for node in ast.iter_child_nodes(value):
        if isinstance(node, ast.expr):
            yield node
        else:
            yield from _expressions(node)


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the (target, value) pairs that a node binds."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend")
    ):
        for value in node.args:
            yield node.func.value, value


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Split ``a, b = x, y`` into the pairs (a, x) and (b, y)."""
    pair = (ast.Tuple, ast.List)
    if (
        isinstance(target, pair)
        and isinstance(value, pair)
        and len(target.elts) == len(value.elts)
    ):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None

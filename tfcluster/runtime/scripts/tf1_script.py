"""Whether the program is a TensorFlow 1 script that trains in a cluster by itself.

Such a program builds a graph in each task and uses parameter servers through sessions.
So the runtime shards nothing for it, and each task has its own random seed. This is
known from its main file, before its first line runs. Knows no TensorFlow.
"""

from __future__ import annotations

import ast

from tfcluster.model import Strategy
from tfcluster.runtime.context import Context
from tfcluster.runtime.scripts.run_script import Program
from tfcluster.runtime.scripts.self_distributed import source_of

NAMES = (
    "ClusterSpec",
    "MonitoredTrainingSession",
    "Supervisor",
    "SyncReplicasOptimizer",
    "parameter_server_graph",
    "replica_device_setter",
    "replicated_graph",
)

_claimed = False


def claimed() -> bool:
    """Whether the program is such a script."""
    return _claimed


def claim() -> None:
    """Record that the program is such a script: it has a session on the cluster."""
    global _claimed
    _claimed = True


def read(program: Program, context: Context) -> None:
    """Find out from the source of the program's main file."""
    global _claimed
    _claimed = concerns(context) and says_so(source_of(program) or "")


def concerns(context: Context) -> bool:
    """Whether this task has a cluster for such scripts: a rank, and ps tasks."""
    return (
        context.strategy in (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
        and context.place is not None
        and bool(context.cluster.get("ps"))
        and bool(context.addresses)
    )


def says_so(source: str) -> bool:
    """Whether the source uses one of ``NAMES``."""
    if not any(name in source for name in NAMES):
        return False
    try:
        return any(map(_names_one, ast.walk(ast.parse(source))))
    except (SyntaxError, ValueError, RecursionError):
        return False


def _names_one(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in NAMES) or (
        isinstance(node, ast.Name) and node.id in NAMES
    )

"""Master copies, on the parameter servers, of variables that each worker also has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.tensor_types import Operation, Tensor, Variable
from tfcluster.runtime.tf1.towers import require_same

tf1 = tf.compat.v1


def scope_of(tower: int) -> str:
    """The name of a tower's variable scope."""
    return f"tower{tower}"


def local(getter: Callable[..., Variable], name: str, **options: Any) -> Variable:
    """A ``custom_getter`` for variable scopes; makes variables local to the worker."""
    wanted = list(options.get("collections") or [tf1.GraphKeys.GLOBAL_VARIABLES])
    options["collections"] = [
        tf1.GraphKeys.LOCAL_VARIABLES if key == tf1.GraphKeys.GLOBAL_VARIABLES else key
        for key in wanted
    ]
    return getter(name, **options)


def require_own(before: Sequence[Variable]) -> None:
    """Raise CollectiveMismatchError if a tower has created global variables.

    ``before`` are the global variables that existed before.
    """
    known = {variable.name for variable in before}
    foreign = [v.name for v in tf1.global_variables() if v.name not in known]
    if foreign:
        raise CollectiveMismatchError(
            "a tower must create its variables with tf.compat.v1.get_variable in the "
            f"current variable scope; these were not: {', '.join(foreign)}"
        )


class MasterCopies:
    """Each tower's variables in a collection, by their common name."""

    def __init__(self, collection: str, towers: int) -> None:
        self._towers = [
            {
                _without_scope(variable, tower): variable
                for variable in tf1.get_collection(collection)
                if variable.name.startswith(f"{scope_of(tower)}/")
            }
            for tower in range(towers)
        ]
        require_same([list(found) for found in self._towers])

    @property
    def names(self) -> list[str]:
        """The names in the order of creation."""
        return list(self._towers[0])

    def of(self, name: str) -> list[Variable]:
        """The variable with that name in each tower."""
        return [found[name] for found in self._towers]

    def in_tower(self, tower: int) -> list[Variable]:
        """One tower's variables, in the order of ``names``."""
        return [self._towers[tower][name] for name in self.names]


def create_master_copy(copy: Variable, name: str, *, trainable: bool) -> Variable:
    """Create the master copy of ``copy``, with the same initial value."""
    made: Variable = tf1.get_variable(
        name,
        dtype=copy.dtype.base_dtype,
        initializer=copy.initial_value,
        trainable=trainable,
    )
    return made


def read(master: Variable) -> Tensor:
    """The value of ``master`` at this point of the graph.

    The value is read on the variable's own device: otherwise it may be sent before the
    ops on which this read depends have run.
    """
    with tf1.device(master.device):
        return tf1.identity(master.read_value())


def copied(master: Variable, copies: Sequence[Variable]) -> list[Operation]:
    """Ops that set each of ``copies`` to the value of ``master``."""
    value = read(master)
    return [copy.assign(value).op for copy in copies]


def pushed(copy: Variable, master: Variable) -> Operation:
    """An op that sets ``master`` to the value of ``copy``."""
    with tf1.device(copy.device):
        value = tf1.identity(copy.read_value())
    assignment: Operation = master.assign(value).op
    return assignment


def _without_scope(variable: Variable, tower: int) -> str:
    return str(variable.op.name).removeprefix(f"{scope_of(tower)}/")

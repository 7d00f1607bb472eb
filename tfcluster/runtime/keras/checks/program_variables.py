"""Finds variables of the program that a step sets from the rows of one rank.

Layers and metrics keep their state in Keras weights, which the ranks combine. A program
may also keep state in its own ``tf.Variable``, such as a queue of embeddings or a
running sum. A variable that is set from a batch sees the rows of one rank only, so its
value is not the same as on one machine, and it differs between the ranks. The ranks
compare these variables after steps 1, 2, 4, 8 and so on that exchange gradients. If a
variable differs and a loss depends on it, training is refused; otherwise there is a
warning.
"""

from __future__ import annotations

import hashlib
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.collective import Signature, rank_divergence
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.program_lines import is_of_the_user, user_line
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.tf_variables import is_ours
from tfcluster.runtime.keras.types import Tape
from tfcluster.runtime.tensor_types import Graph, Nest, Tensor, Variable

_MOST_VARIABLES = 100
_MOST_BYTES = 1 << 20
"""How many bytes of two variables are compared number by number."""
_HOOKS = (__file__, contract.__file__)
_GENERATORS = "stateful_random_ops.py"
"""TensorFlow's file whose assignments advance random generators."""


@dataclass(slots=True)
class _Known:
    """A variable that the program sets."""

    variable: weakref.ref[Variable]
    line: str
    """The line that first set it."""
    name: str
    told: bool = False


class ProgramVariables:
    """The hooks on assignments, tapes, functions and eager optimizers."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._found: list[_Known] = []
        self._is_program = ObjectMap[bool]()
        """Whether the program, and not a library, was the first to set a variable."""
        self._read = ObjectMap[bool]()
        """Handles of variables on which a loss depends."""
        self._seen: weakref.WeakKeyDictionary[Graph, set[int]] = (
            weakref.WeakKeyDictionary()
        )
        """Ids of the operations of a graph whose inputs have been looked at."""
        self._applies = 0
        """The number of exchanges of gradients, as of the last step."""
        self._steps = 0

    def install(self) -> None:
        patches.TABLE.install({patches.OPTIMIZER_APPLY: self._step})
        tf_patches.TABLE.install(
            {
                **dict.fromkeys(tf_patches.ASSIGNMENTS, self._assign),
                **dict.fromkeys(tf_patches.SCATTERED_ASSIGNMENTS, self._assign),
                tf_patches.TAPE_GRADIENT: self._before_gradient,
                tf_patches.FUNCTION_CALL: self._step,
            }
        )

    def _assign(
        self,
        original: Callable[..., Any],
        variable: Variable,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if variable not in self._is_program:
            is_program = not is_ours(variable.handle) and _is_called_by_the_program()
            self._is_program[variable] = is_program
            if is_program and len(self._found) < _MOST_VARIABLES:
                name = variable.name.partition(":")[0]
                self._found.append(_Known(weakref.ref(variable), user_line(), name))
        return original(variable, *args, **kwargs)

    def _before_gradient(
        self, tape: Tape, target: Nest, sources: Nest, *args: Any, **kwargs: Any
    ) -> None:
        """Record the variables on which the target of a tape in a graph depends."""
        if tf.executing_eagerly() or self._session.within("apply"):
            return
        graph: Graph = tf.compat.v1.get_default_graph()
        seen = self._seen.setdefault(graph, set())
        for handle in _handles_below(tf.nest.flatten(target), seen):
            self._read[handle] = True

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function or an eager optimizer, and compare after some of the steps.

        All ranks reach this point after an exchange of gradients.
        """
        result = original(*args, **kwargs)
        if tf.executing_eagerly() and self._session.applies > self._applies:
            self._applies = self._session.applies
            self._steps += 1
            if self._steps & (self._steps - 1) == 0:
                self._compare()
        return result

    def _compare(self) -> None:
        """Compare the ranks' variables. All ranks call this at the same point."""
        values: dict[str, Array] = {}
        ours: dict[str, tuple[str, bool]] = {}
        labels = self._labels()
        for label, known in labels.items():
            variable = known.variable()
            if known.told or variable is None or (value := _value(variable)) is None:
                continue
            values[label] = value
            ours[label] = _digest(value), variable.handle in self._read
        ranks: list[dict[str, tuple[str, bool]]] = [
            json.loads(data)
            for data in self._gathered(json.dumps(ours).encode(), "own variables")
        ]
        for label in ranks[0]:
            said = [found[label] for found in ranks if label in found]
            if len(said) < len(ranks) or len({digest for digest, _ in said}) == 1:
                continue
            if not self._is_rounding(values[label]):
                self._tell(labels[label], refuses=any(read for _, read in said))

    def _labels(self) -> dict[str, _Known]:
        """The variables by labels that are equal on all ranks.

        A rank may have set additional variables in between: the chief may, for example.
        """
        found: dict[str, _Known] = {}
        counts = Counter[tuple[str, str]]()
        for known in self._found:
            counts[known.line, known.name] += 1
            number = counts[known.line, known.name]
            found[f"{known.line} {known.name} {number}"] = known
        return found

    def _is_rounding(self, value: Array) -> bool:
        """Whether the ranks' values of a variable that differs are nearly equal."""
        flat = value.reshape(-1)[: _MOST_BYTES // value.itemsize]
        sent = self._gathered(flat.tobytes(), "an own variable")
        arrays = [np.frombuffer(data, value.dtype) for data in sent]
        if len({array.size for array in arrays}) > 1 or value.dtype.kind not in "fV":
            return False
        allowed = rank_divergence.rounding_of(value.itemsize)
        away = max(rank_divergence.distance(arrays[0], each) for each in arrays)
        # If the compared part is equal, the rest of a large variable differs.
        return 0 < away <= allowed

    def _gathered(self, data: bytes, what: str) -> Sequence[bytes]:
        return allgather_bytes(self._session.group, data, Signature(what))

    def _tell(self, known: _Known, *, refuses: bool) -> None:
        known.told = True
        text = (
            f"{known.line} sets the tf.Variable {known.name} from the rows of one "
            "rank, so its value is not the same as on one machine. "
        )
        if refuses:
            self._session.differs(
                f"{text}A loss depends on it. Set it from the rows of all ranks, which "
                "tfcluster.runtime.gather_batch returns, or keep it in a weight of a "
                "layer (add_weight with an aggregation)"
            )
        else:
            self._session.warn(
                f"{text}This affects what the program prints, keeps or decides with "
                "it. A Keras metric gives the number for the whole batch, and "
                "tfcluster.runtime.gather_batch returns the rows of all ranks"
            )


def _is_called_by_the_program() -> bool:
    """Whether the program called the variable's method, not Keras or tfcluster."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind is not None:
            return kind
        frame = frame.f_back
    return False


@cache
def _kind_of(file: str) -> bool | None:
    """Whether a file is the program's; None if its code runs on behalf of a caller."""
    if file in _HOOKS:
        return None
    if tf_internals.is_generated(file) or is_of_the_user(file):
        return True
    return None if _is_of_tensorflow(file) and _GENERATORS not in file else False


def _is_of_tensorflow(file: str) -> bool:
    return file.startswith(tf.__file__.rpartition("/")[0])


def _handles_below(targets: Sequence[Any], seen: set[int]) -> list[Tensor]:
    """The handles of the variables on which tensors of a graph depend.

    Operations whose ids are in ``seen`` are skipped; the ids of new ones are added.
    """
    found: list[Tensor] = []
    todo = [each for each in targets if tf.is_tensor(each)]
    captures: dict[int, dict[int, Tensor]] = {}
    while todo:
        tensor: Tensor = todo.pop()
        operation = tensor.op
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        todo += operation.inputs
        if tensor.dtype == tf.resource:
            found.append(_outside(tensor, captures))
    return found


def _outside(tensor: Tensor, captures: dict[int, dict[int, Tensor]]) -> Tensor:
    """The tensor that a graph, and the graphs around it, have captured as ``tensor``.

    ``captures`` contains captured tensors by the ids of graphs and of the tensors in
    them; missing graphs are added.
    """
    while not tf_internals.is_eager(tensor):
        graph: Graph = tensor.graph
        known = captures.get(id(graph))
        if known is None:
            pairs = getattr(graph, "captures", ())
            known = captures[id(graph)] = {id(inner): outer for outer, inner in pairs}
        if id(tensor) not in known:
            break
        tensor = known[id(tensor)]
    return tensor


def _value(variable: Variable) -> Array | None:
    """The variable's value; None if it has no value that can be compared."""
    try:
        found = np.asarray(variable.numpy())
    except (tf.errors.OpError, AttributeError, NotImplementedError, TypeError):
        return None
    return None if found.dtype.kind in "OSU" else np.ascontiguousarray(found)


def _digest(value: Array) -> str:
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()

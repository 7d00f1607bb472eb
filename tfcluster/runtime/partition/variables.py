"""Compares the variables that programs use over the ranks, from time to time.

Outside of programs all ranks hold the same bits. Processors of different kinds may
round differently, though, and then variables drift apart in their last bits: all ranks
continue with the chief's. A larger difference has another cause, and is an error.
"""

from __future__ import annotations

import contextlib
import re
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError, Group, Signature, tensor_words
from tfcluster.runtime.collective.rank_divergence import summary, text_of
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import DType, Tensor

_FIRST, _EVERY = (1, 2, 4), 8
"""Variables are compared in these calls of a program, and then in every eighth."""
_CHUNK_BYTES = 1 << 20
"""The most that is compared in one call; the next comparison continues there."""
_MAX_LABELS = 200
"""The most variables that are compared when the programs end."""
_LAST_BITS = 1e-3
"""The largest difference, relative to a variable's largest value, that rounding on
processors of different kinds makes of equal variables between two comparisons."""


_NO_NAME = re.compile("(?:argument|args?|inputs?|resource|unknown)_?[0-9]*")
"""Names that TensorFlow gives to inputs without one."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A variable, by its handle, which is an input of a function."""

    name: str
    handle: Tensor
    dtype: DType
    place: int
    """The number of the input."""
    shape: Shape = ()

    def value(self) -> Array:
        """The variable's value."""
        read = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        return np.asarray(read)

    def assign(self, value: Array) -> None:
        tensor = tf.constant(value, self.dtype)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tensor)


VariableNames = Callable[[], Mapping[int, str]]
"""Returns the names of this process's variables, by the ``id`` of their handles."""


def watched(
    names: Sequence[str], inputs: Sequence[Tensor], names_by_id: Mapping[int, str]
) -> list[Watched]:
    """The variables of numbers among a function's inputs.

    Their names are those of ``names_by_id``, or else those of the inputs.
    """
    variables = []
    for place, (name, tensor) in enumerate(zip(names, inputs, strict=True)):
        spec = tf_functions.variable_spec(tensor)
        if spec is not None and spec[0] not in (tf.string, tf.variant, tf.resource):
            dtype, shape = spec
            if not name or _NO_NAME.fullmatch(name):
                name = f"a variable of {dtype.name} {shape}"
            name = names_by_id.get(id(tensor), name)
            variables.append(Watched(name, tensor, dtype, place, shape))
    return variables


@dataclass(slots=True)
class _Compared:
    """A variable that was compared."""

    handle: Callable[[], Tensor | None]
    """Returns None when the variable is gone."""
    label: str
    """Equal on all ranks, and different for all variables."""
    dtype: DType
    equal_in: int = 0
    """The number of a program's call in which it was last seen to be equal."""
    is_new: bool = False
    """Whether the ranks may hold other values, of which the chief's count."""


class VariableCheck:
    """Compares variables over the ranks.

    ``warn`` is called on all ranks, with a text, if the chief's values are taken. Those
    of which ``is_divided`` says that a rank holds a piece cannot be compared.
    """

    def __init__(
        self,
        group: Group,
        warn: Callable[[str], None],
        is_divided: Callable[[Tensor], bool] = lambda handle: False,
    ) -> None:
        self._group = group
        self._warn = warn
        self._is_divided = is_divided
        self._calls: Counter[str] = Counter()
        self._next: Counter[str] = Counter()
        """For each program, the number of the first variable of its next comparison."""
        self._compared: dict[int, _Compared] = {}
        """The variables that were compared, by the ``id`` of their handles."""
        self._labels: Counter[str] = Counter()

    def renew(self) -> None:
        """Let all variables get the chief's values in the next call of a program.

        All ranks must call this.
        """
        for entry in self._compared.values():
            entry.is_new = True

    def due(self, program: str, variables: Sequence[Watched]) -> list[Watched]:
        """The variables to compare in this call: all new ones, and sometimes others."""
        self._calls[program] += 1
        calls = self._calls[program]
        new = self.new(variables)
        if new or not variables or (calls not in _FIRST and calls % _EVERY):
            return new
        due: list[Watched] = []
        size, place = 0, self._next[program] % len(variables)
        turn = place
        for variable in (*variables[place:], *variables[:place]):
            if due and size >= _CHUNK_BYTES:
                break
            turn += 1
            if not self._is_divided(variable.handle):
                due.append(variable)
                size += variable.value().nbytes
        self._next[program] = turn
        return due

    def place(self, program: str) -> tuple[int, int]:
        """Where a program is in its comparisons, for ``go_back``."""
        return self._calls[program], self._next[program]

    def go_back(self, program: str, place: tuple[int, int]) -> None:
        """Forget the calls of ``due`` since then: another rank has not called it."""
        self._calls[program], self._next[program] = place

    def new(self, variables: Sequence[Watched]) -> list[Watched]:
        """The variables that were never compared."""
        return [variable for variable in variables if self._is_new(variable.handle)]

    def settle(
        self, program: str, variables: Sequence[Watched], *, differ: bool
    ) -> None:
        """End a comparison; all ranks must call this with what ``due`` returned.

        If they ``differ``, make them equal. New variables get the chief's values.
        Raises CollectiveError on all ranks if others differ by more than rounding.
        """
        for variable in variables:
            if differ:
                self._settle_one(program, variable)
            self._note(program, variable)

    def _is_new(self, handle: Tensor) -> bool:
        entry = self._compared.get(id(handle))
        if entry is not None and not entry.is_new:
            return False
        return not self._is_divided(handle)

    def _note(self, program: str, variable: Watched) -> None:
        key, compared = id(variable.handle), self._compared
        entry = compared.get(key)
        if entry is None:
            self._labels[variable.name] += 1
            number = self._labels[variable.name]
            label = variable.name if number == 1 else f"{variable.name} {number}"
            ref = weakref.ref(variable.handle, lambda _: compared.pop(key, None))
            entry = compared[key] = _Compared(ref, label, variable.dtype)
        entry.is_new = False
        entry.equal_in = self._calls[program]

    def last_state(self) -> dict[str, str]:
        """The variables' values as short texts, to compare when the programs end."""
        texts: dict[str, str] = {}
        for entry in list(self._compared.values())[-_MAX_LABELS:]:
            handle = entry.handle()
            # Not worth an error: a variable may end with the program.
            with contextlib.suppress(Exception):
                if handle is not None and not self._is_divided(handle):
                    value = Watched(entry.label, handle, entry.dtype, 0).value()
                    texts[entry.label] = (
                        text_of(value) if value.ndim == 0 else summary([value])
                    )
        return texts

    def last_equal(self) -> dict[str, int]:
        """By label: the last call of a program in which the value was equal."""
        return {entry.label: entry.equal_in for entry in self._compared.values()}

    def _settle_one(self, program: str, variable: Watched) -> None:
        own = variable.value()
        words = tensor_words(variable.name, variable.dtype.name, own.shape)
        signature = Signature("comparison of variables", (words,))
        with self._group.exchange(signature) as call:
            parts = call.transport.allgather(own.tobytes())
        if all(part == parts[0] for part in parts):
            return
        values = [np.frombuffer(part, own.dtype) for part in parts]
        if not self._is_new(variable.handle):
            rank, difference = _largest_difference(values)
            if not difference <= _LAST_BITS:
                raise CollectiveError(
                    f"{program}: the ranks do not train the same model: "
                    f"{variable.name} differs between rank 0 and rank {rank} by "
                    f"{difference:.1e} of its largest value in call "
                    f"{self._calls[program]}. Does the program change variables on one "
                    "rank only, or read other files, another time or other random "
                    "numbers there?"
                )
            self._warn(
                "the ranks round differently, because of their processors or because "
                "TensorFlow optimizes a graph in more than one way: variables differ "
                "in their last bits, and all ranks continue with the chief's"
            )
        variable.assign(values[0].reshape(own.shape))


def digest(variables: Sequence[Watched]) -> int:
    """A checksum of the variables' values, 32 bits."""
    checksum = 0
    for variable in variables:
        flat = np.ascontiguousarray(variable.value()).reshape(-1)
        checksum = zlib.crc32(flat.view(np.uint8).data, checksum)
    return checksum


def _largest_difference(values: Sequence[Array]) -> tuple[int, float]:
    """The rank that differs most from the chief, and by how much, relatively."""
    if values[0].dtype.kind not in "fVc":
        # Counters and seeds do not round.
        unlike = [r for r, v in enumerate(values) if not np.array_equal(v, values[0])]
        return unlike[0], float("inf")
    chief = np.asarray(values[0], np.float64)
    finite = np.abs(chief[np.isfinite(chief)])
    largest = max(float(finite.max()) if finite.size else 0.0, 1e-30)
    worst_rank = (0, 0.0)
    for rank, value in enumerate(values):
        difference = np.abs(np.asarray(value, np.float64) - chief)
        worst = float(np.nanmax(difference, initial=0.0)) / largest
        unlike = (np.isnan(chief) != np.isnan(value.astype(np.float64))).any()
        if unlike or worst > worst_rank[1]:
            worst_rank = rank, float("inf") if unlike else worst
    return worst_rank

"""Merges the results of a function that was called for each shard of a batch.

The merged results belong to the whole batch, with the same bits on all ranks: a
floating number is the mean over the shards by rows, and rows are joined. A result that
does not depend on the rows of a shard stays as it is. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature, tensor_words
from tfcluster.runtime.collective.ragged_collectives import allgatherv
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.gradient_allreduce import Target
from tfcluster.runtime.keras.train.shard_exchange import ShardGradients, exchange_shards
from tfcluster.runtime.keras.train.shard_steps import ShardPart, ShardSteps
from tfcluster.runtime.tensor_types import Array, DType, Nest, Tensor

_NEAR = 0.05
"""How close to 2 the factor is by which a sum over rows grows if each row comes twice.
"""

_ADVICE = (
    "Return a number that is a mean over the rows, a tensor with one entry for each "
    "row, or nothing, and keep other numbers in metrics of Keras"
)


@dataclass(frozen=True, slots=True)
class _Number:
    """A number that a function returns, as part of an exchange."""

    name: str
    dtype: DType
    shape: tuple[int, ...] = ()


class ShardResults:
    """Merges the results of a function."""

    def __init__(
        self, session: Session, steps: ShardSteps, row_terms: RowTerms
    ) -> None:
        self._session = session
        self._steps = steps
        self._row_terms = row_terms

    def look(self, found: Nest, where: str) -> None:
        """Check that numbers among the results for one shard are means over its rows.

        ``where`` is the line that calls the function. If they are not, this ends the
        step or warns: see ``Session.differs``.
        """
        self._row_terms.look_at_results(self._numbers(found), where)

    def compare(self, once: Nest, repeated: Nest) -> None:
        """Check the results for some rows against those for each of the rows twice."""
        pairs = list(zip(self._numbers(once), self._numbers(repeated), strict=False))
        if not pairs:
            return
        where = user_line()

        def judge(*numbers: Array) -> np.bool_:
            for one, two in zip(numbers[0::2], numbers[1::2], strict=True):
                if one and abs(float(two) / float(one) - 2.0) < _NEAR:
                    self._session.differs(
                        f"{where}: a number that a tf.function returns is a sum over "
                        "the rows of a batch. With runtime.shards, the function runs "
                        "once for each shard, and the loop gets the mean of what it "
                        f"returns. {_ADVICE}"
                    )
            return np.bool_(True)

        exchange_in_order(judge, [each for pair in pairs for each in pair], tf.bool)

    def _numbers(self, found: Nest) -> list[Tensor]:
        """The floating numbers among the results that depend on a shard's rows."""
        return [
            each
            for each in tf.nest.flatten(found, expand_composites=True)
            if _is_number(each) and self._steps.depends([each])
        ]

    def merged(self, found: Sequence[Nest], parts: Sequence[ShardPart]) -> Nest:
        """The result for the whole batch; ``found`` has the results for ``parts``.

        All ranks must call this at the same place. Raises CollectiveError for results
        that cannot be merged, and what exchanges raise.
        """
        try:
            for other in found[1:]:
                tf.nest.assert_same_structure(found[0], other, expand_composites=True)
        except (TypeError, ValueError):
            self._refuse("results whose structure differs between shards of a batch")
        each = [tf.nest.flatten(one, expand_composites=True) for one in found]
        results = list(each[0])
        numbers = []
        for place, values in enumerate(zip(*each, strict=True)):
            if self._is_common(values):
                continue
            if self._are_rows(values, parts):
                results[place] = self._joined(values, parts)
            elif _is_number(values[0]):
                numbers.append(place)
            else:
                self._refuse(
                    f"a tensor of dtype {values[0].dtype.name} and shape "
                    f"{values[0].shape} that depends on the rows of the batch"
                )
        means = self._means([[one[place] for place in numbers] for one in each], parts)
        for place, mean in zip(numbers, means, strict=True):
            results[place] = mean
        return tf.nest.pack_sequence_as(found[0], results, expand_composites=True)

    def _is_common(self, values: Sequence[Any]) -> bool:
        """Whether a result is the same for all shards."""
        if all(map(tf.is_tensor, values)):
            return not self._steps.depends(values)
        if all(value is values[0] or _equal(value, values[0]) for value in values[1:]):
            return True
        return self._refuse("a value that differs between shards of a batch")

    def _are_rows(self, values: Sequence[Tensor], parts: Sequence[ShardPart]) -> bool:
        """Whether a result has one entry for each row."""
        return all(
            value.shape.rank and value.shape[0] == _rows_of(part).shape[0]
            for value, part in zip(values, parts, strict=True)
        )

    def _joined(self, values: Sequence[Tensor], parts: Sequence[ShardPart]) -> Tensor:
        """The entries of all rows of the batch, in their order."""
        # A shard without rows has computed one row, which does not count.
        counted = [
            value[: tf.cast(part.share.rows, tf.int32)]
            for value, part in zip(values, parts, strict=True)
        ]
        own = tf.concat(counted, 0)
        words = tensor_words("rows", own.dtype, own.shape[1:])
        signature = Signature("rows that a function returns", (words,))

        def run(rows: Array) -> Array:
            with self._session.group.exchange(signature) as call:
                return allgatherv(call.transport, np.ascontiguousarray(rows))[0]

        joined = exchange_in_order(run, [own], own.dtype)
        joined.set_shape([None, *own.shape[1:]])
        return joined

    def _means(
        self, numbers: Sequence[list[Tensor]], parts: Sequence[ShardPart]
    ) -> list[Tensor]:
        """The means over all shards of a batch, by rows."""
        if not numbers[0]:
            return []
        computed = [
            ShardGradients(part.share.rows, [], each)
            for part, each in zip(parts, numbers, strict=True)
        ]
        described = [
            _Number(f"result {place}", number.dtype)
            for place, number in enumerate(numbers[0])
        ]
        _, means = exchange_shards(
            self._session,
            Target.of("results of a function"),
            computed,
            [],
            described,
        )
        return means

    def _refuse(self, what: str) -> Any:
        self._session.refuse(
            f"a tf.function that trains in a loop returns {what}. With runtime.shards "
            f"it runs once for each shard. {_ADVICE}"
        )


def _is_number(value: Any) -> bool:
    return bool(
        tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of Python or numpy are equal."""
    return type(one) is type(other) and bool(np.all(one == other))


def _rows_of(part: ShardPart) -> Tensor:
    """A tensor of a part that has the part's rows."""
    found: Tensor = tf.nest.flatten(part.data)[0]
    return found

"""The state of the program's own metrics, and how the ranks' values are combined.

Keras's metrics accumulate sums. A metric of the program's own may keep a maximum, or
add up the mean of each batch. The first update tests which it does; see
``state_updates``.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.state_trials import Trials
from tfcluster.runtime.keras.train.state_updates import Kind, Trial, agreed, kind_of
from tfcluster.runtime.keras.types import Metric, Variable
from tfcluster.runtime.tensors import name_of

_PLAIN = Kind("sum", 1.0)
_MEANS = Kind("mean", 1.0)
"""The mean of each batch is added to the variable."""


@dataclass
class _Kept:
    """A variable of one of the program's own metrics."""

    variable: weakref.ref[Any]
    weighs: Any
    """A tf.Variable: whether changes are means, to be weighted by this rank's rows."""
    kind: Kind | None = None
    settled: bool = False
    """Whether all ranks know its kind and agree."""


class MetricState:
    """Tracks the variables of metrics, and merges their values over the ranks."""

    def __init__(self, session: Session, loops: DatasetIteration) -> None:
        self._session = session
        self._loops = loops
        self._kept: dict[int, _Kept] = {}
        self._trials = Trials()
        self._local = threading.local()

    def fraction(self) -> Any:
        """This rank's fraction of the batch's rows; None if unknown."""
        if (share := self._session.share) is None:
            return None if self._session.inside_keras else self._loops.fraction.read()
        if share.total is None:
            return None
        return tf.cast(share.rows, tf.float64) / tf.cast(share.total, tf.float64)

    # --- in an update ---------------------------------------------------------------

    @property
    def trying(self) -> bool:
        """Whether this thread is testing an update, which must not change anything."""
        return bool(getattr(self._local, "trying", False))

    def known(self, metric: Metric) -> Any:
        """A boolean or boolean tensor: whether the kind of a metric's state is known.

        None for metrics that ``look`` has not been given.
        """
        kept = [self._kept.get(id(variable)) for variable in metric.variables]
        looked_at = [one for one in kept if one is not None]
        if not looked_at:
            return None
        if all(one.settled for one in looked_at):
            return True
        return self._trials.known(metric)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def look(self, metric: Metric, args: Any, kwargs: Any) -> None:
        """Find out how ``metric``, which is about to be updated, changes its state.

        It is one of the program's own, or wraps a function of the program's own.
        """
        variables = list(metric.variables)
        kept = [self._of(variable) for variable in variables]
        if all(one.kind is not None for one in kept):
            return
        current = [tf.convert_to_tensor(variable.value) for variable in variables]
        places = [p for p, value in enumerate(current) if value.dtype != tf.bool]

        def update(values: Sequence[Any], given: Any) -> list[Any]:
            args, kwargs = given
            found = metric.stateless_update_state(list(values), *args, **kwargs)
            return [tf.convert_to_tensor(value) for value in found]

        chosen = [kept[place] for place in places]

        def judge(trials: Sequence[Trial]) -> list[bool]:
            for one, trial in zip(chosen, trials, strict=True):
                one.kind = one.kind or kind_of(trial)
                if (
                    internals.function_of(metric) is not None
                    and one.kind
                    and one.kind.how == "other"
                ):
                    one.kind = _MEANS
                    self._session.warn(
                        f"the metric {metric.name} is not a mean over the rows of a "
                        "batch: each rank computes it from its own rows, so its value "
                        "differs from that of one machine"
                    )
            known = all(one.kind is not None for one in chosen)
            return [known, *(one.kind == _MEANS for one in chosen)]

        self._local.trying = True
        # A metric may not support this kind of call. Then assume that it sums.
        with contextlib.suppress(Exception):
            given = args, kwargs
            flags = [one.weighs for one in chosen]
            self._trials.look(metric, update, current, places, given, judge, flags)
        self._local.trying = False

    def weighed(self, variable: Variable, value: Any, current: Any) -> Any:
        """The value to assign: of a mean over rows, only this rank's part."""
        one = self._kept.get(id(variable))
        if one is None or one.variable() is not variable or self.trying:
            return value
        fraction = self.fraction()
        if fraction is None or not current.dtype.is_floating:
            return value
        part = current + (value - current) * tf.cast(fraction, current.dtype)
        return tf.where(one.weighs, part, value)

    def _of(self, variable: Variable) -> _Kept:
        one = self._kept.get(id(variable))
        if one is None or one.variable() is not variable:
            with tf.init_scope():
                weighs = tf.Variable(False, trainable=False)
            one = self._kept[id(variable)] = _Kept(weakref.ref(variable), weighs)
        return one

    # --- of all ranks ---------------------------------------------------------------

    def merged(
        self,
        variables: Sequence[Variable],
        local: Sequence[Array],
        what: str,
        weight: float,
    ) -> list[Array]:
        """The values merged over all ranks; ``weight`` is that of the last batch."""
        session = self._session
        ways = [str(variable.aggregation) for variable in variables]
        signature = Signature(
            what,
            tuple(
                tensor_words(f"{variable.path} ({way})", value.dtype, value.shape)
                for variable, value, way in zip(variables, local, ways, strict=True)
            ),
        )
        found = [self._kept.get(id(variable)) for variable in variables]
        own = [one for one in found if one is not None]
        self._settle(own, signature)
        for place, one in enumerate(found):
            if one is not None and ways[place] in ("sum", "none"):
                ways[place] = self._way(one, local[place])
        sums, extremes = [], []
        for value, way in zip(local, ways, strict=True):
            silent = way in ("none", "only_first_replica") and not session.chief
            array = np.zeros_like(value) if silent else value
            factor = weight if way == "rows" else 1.0
            sums.append(_summable(array) if factor == 1.0 else array * factor)
            if way in ("max", "min"):
                sign = 1.0 if way == "max" else -1.0
                extremes.append(sign * np.asarray(value, np.float64))
        sums.append(np.array([weight]))
        *totals, weights = reduce_arrays(session.group, sums, ReduceOp.SUM, signature)
        highest = iter(
            reduce_arrays(session.group, extremes, ReduceOp.MAX, signature)
            if extremes
            else ()
        )
        merged = []
        for total, value, way in zip(totals, local, ways, strict=True):
            if way in ("max", "min"):
                result = next(highest) * (1.0 if way == "max" else -1.0)
            elif way == "mean":
                result = total / session.size
            elif way == "rows":
                result = total / float(weights[0]) if weights[0] else value
            else:
                result = total
            merged.append(np.asarray(result).astype(value.dtype))
        return merged

    def _settle(self, kept: Sequence[_Kept], signature: Signature) -> None:
        """Agree on the kinds with the other ranks, until all ranks know all of them."""
        if all(one.settled for one in kept):
            return
        ours = [None if one.kind is None else asdict(one.kind) for one in kept]
        said = [
            json.loads(text)
            for text in allgather_bytes(
                self._session.group, json.dumps(ours).encode(), signature
            )
        ]
        for place, one in enumerate(kept):
            kinds = [
                None if rank[place] is None else Kind(**rank[place]) for rank in said
            ]
            one.kind = agreed(kinds)
            one.settled = None not in kinds
            one.weighs.assign(one.kind == _MEANS)

    def _way(self, one: _Kept, value: Array) -> str:
        kind = one.kind or _PLAIN
        if kind.how in ("max", "min"):
            return kind.how
        if kind == _MEANS:
            # Floats are sums of the ranks' parts; integers are the same on all ranks.
            return "max" if value.dtype.kind in "iu" else "sum"
        if kind.how == "mean":
            return "rows"
        if kind.how == "sum" and kind.slope in (0.0, 1.0):
            return "sum"
        self._session.warn(
            f"the value that a custom metric keeps in {name_of(one.variable())} is "
            "neither a sum, nor a mean, nor a maximum of rows: the ranks' values are "
            "summed, which may differ from the value on one machine"
        )
        return "sum"


def _summable(array: Array) -> Array:
    if array.dtype == np.bool_:
        return array.astype(np.int64)
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return array.astype(np.float32)
    return array

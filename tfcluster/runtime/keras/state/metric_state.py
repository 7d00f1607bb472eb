"""The state of the program's own metrics, and how the ranks' values are combined.

Keras's metrics accumulate sums. A custom metric may keep a maximum, or add up the mean
of each batch. It may declare this with ``merge_with``; otherwise, the first update
finds out what it does, with the rows of all ranks (see ``state_updates``). If it does
something else, and as long as this is unknown, updates get the rows of all ranks, and
the chief's state is the result. Updates that keep something in Python (lists, arrays)
also get the rows of all ranks, because the ranks' values cannot be combined: then every
rank has the same state as one machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.batches.batch_slicing import has_dense_rows
from tfcluster.runtime.keras.checks.known_objects import KnownObjects, new_flag
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.losses.whole_batch import WholeBatch, can_be_gathered
from tfcluster.runtime.keras.merge_rules import declared_rule
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import OF_ALL_ROWS, Session
from tfcluster.runtime.keras.state.observed_variables import (
    ObservedVariable,
    agree_on_kinds,
    take_kinds_of_chief,
)
from tfcluster.runtime.keras.state.python_state import PythonState
from tfcluster.runtime.keras.state.state_trials import Trials
from tfcluster.runtime.keras.state.state_updates import CLOSE, ROUNDING, Kind, Trial
from tfcluster.runtime.keras.types import Metric, Variable
from tfcluster.runtime.tensor_types import Nest, Tensor, TensorLike
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import name_of

_PLAIN = Kind("sum", 1.0)
_MEANS = Kind("mean", 1.0)
"""The mean of each batch is added to the variable."""
_OF_ALL_ROWS = Kind("all rows", 0.0)
"""The chief's value already covers the rows of all ranks."""


@dataclass(kw_only=True)
class _MetricVariable(ObservedVariable):
    """A variable of one of the program's own metrics."""

    declared: bool = False
    """Whether the program has declared the kind with ``merge_with``."""
    gathers: bool = False
    """Whether, while the kind is unknown, only the chief updates it, from all rows."""
    weighs: TfVariable
    """Scalar bool: whether changes are means, to be weighted by this rank's rows."""


class MetricState:
    """Tracks the variables of metrics, and merges their values over the ranks."""

    def __init__(
        self, session: Session, loops: DatasetIteration, whole_batch: WholeBatch
    ) -> None:
        self._session = session
        self._loops = loops
        self._whole_batch = whole_batch
        self._see_all = KnownObjects()
        """Flags the metrics whose updates get all ranks' rows."""
        self._observed = ObjectMap[_MetricVariable]()
        self._trials = Trials()

    def fraction(self) -> TensorLike | None:
        """This rank's fraction of the batch's rows, a scalar, 0..1; None if unknown.

        Returns a float64 tensor or a Python number.
        """
        if (share := self._session.share) is None:
            if self._session.inside_keras:
                return None
            share = self._loops.seen.read()
        return share.fraction

    # --- in an update ---------------------------------------------------------------

    @property
    def trying(self) -> bool:
        """Whether this thread is testing an update, which must not change anything."""
        return self._trials.trying

    def known(self, metric: Metric) -> bool | TfVariable | None:
        """Whether the kinds of a metric's variables are known.

        Returns True, or a boolean scalar variable that a graph can read. Returns None
        if the metric was never passed to ``update``.
        """
        found = [self._observed.get(variable) for variable in metric.variables]
        observed = [one for one in found if one is not None]
        if not observed:
            return None
        if all(one.settled for one in observed):
            return True
        return self._trials.known(metric)

    def update(
        self,
        original: Callable[..., object],
        metric: Metric,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
    ) -> object:
        """Update ``metric``, which is the program's own or wraps a program's function.

        ``original`` is its ``update_state``, and the other arguments are passed to it:
        nested structures whose tensors have this rank's rows in their first dimension.
        Raises what ``original`` and ``WholeBatch.gather`` raise.
        """
        gathers = self._can_gather([args, dict(kwargs)])
        if not metric.variables and not internals.is_of_keras(_update_of(metric)):
            return self._update_python(original, metric, args, kwargs, gathers=gathers)
        self._look(metric, args, kwargs, gathers=gathers)
        if not gathers or self._is_settled_otherwise(metric):
            return original(metric, *args, **kwargs)
        return self._update(original, metric, args, kwargs)

    @property
    def sees_all_rows(self) -> bool:
        """Whether an update is running that got the rows of all ranks."""
        return self._session.within(OF_ALL_ROWS)

    def _can_gather(self, given: Nest) -> bool:
        """Whether the arguments of an update have this rank's rows, and only these."""
        if not self._whole_batch.may_gather() or not can_be_gathered(given):
            return False
        leaves = [leaf for leaf in tf.nest.flatten(given) if leaf is not None]
        share = self._session.share
        if not leaves or (share is None and not self._session.divides):
            return False
        if share is None and not self._session.loop.divided:
            return True  # Every rank has all rows.
        return self._are_own_rows(leaves)

    def _are_own_rows(self, leaves: Sequence[TensorLike]) -> bool:
        """Whether dense tensors of one dimension or more may have this rank's rows."""
        share = self._session.share
        if share is not None:
            present = tf.get_static_value(share.present)
        else:
            present = self._session.loop.present_rows()
        lengths = [tf.convert_to_tensor(leaf).shape[0] for leaf in leaves]
        if present is None:
            # The step serves batches of any size, so a known length is not their rows.
            return not any(length is not None for length in lengths)
        # A rank without rows computes one row, which does not count.
        return all(length in (None, max(int(present), 1)) for length in lengths)

    def _is_settled_otherwise(self, metric: Metric) -> bool:
        found = [self._observed.get(variable) for variable in metric.variables]
        return all(one is None or one.declared for one in found) or all(
            one is not None and one.settled and one.kind != _OF_ALL_ROWS
            for one in found
        )

    # --- state kept in Python -------------------------------------------------------

    def _update_python(
        self,
        original: Callable[..., object],
        metric: Metric,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
        *,
        gathers: bool,
    ) -> object:
        """Update a metric that has no variables, or does not have them yet."""
        if gathers:
            self._update_with_all_rows(original, metric, args, kwargs)
            self._take_all_rows(metric)
            return None
        result = original(metric, *args, **kwargs)
        if not metric.variables:
            self._warn_of_own_rows(metric, [args, dict(kwargs)])
        return result

    def _take_all_rows(self, metric: Metric) -> None:
        """Give all later updates of ``metric`` the rows of all ranks."""
        for variable in metric.variables:
            self._of(metric, variable).kind = _OF_ALL_ROWS
        see_all = self._see_all.of(metric)
        with tf.init_scope():
            see_all.assign(True)

    def _warn_of_own_rows(self, metric: Metric, given: Nest) -> None:
        """Warn if an update that is not given all rows keeps something in Python."""
        leaves = [leaf for leaf in tf.nest.flatten(given) if leaf is not None]
        if not self._has_part() or (
            all(map(has_dense_rows, leaves)) and not self._are_own_rows(leaves)
        ):
            return
        self._session.warn(
            f"the metric {metric.name} keeps what its updates get in Python, not in "
            "Keras variables. The ranks' values cannot be combined, so each rank's "
            "result is computed from its own rows. Keep sums in variables "
            "(self.add_variable), or update it with the rows of all ranks "
            "(tfc.gather_batch)"
        )

    def _has_part(self) -> bool:
        """Whether this rank has only a part of the rows of the current batch."""
        session, share = self._session, self._session.share
        if session.size == 1 or not session.divides:
            return session.size > 1
        if share is None:
            return session.loop.is_dividing and not session.inside_keras
        return not share.alone and share.undivided is not True

    # --- state kept in variables ----------------------------------------------------

    def _update_with_all_rows(
        self,
        original: Callable[..., object],
        metric: Metric,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
    ) -> None:
        what = f"rows for the metric {metric.name}"
        args_of_all, kwargs_of_all = self._whole_batch.gather_nested(
            (args, dict(kwargs)), what
        )
        with self._session.once(OF_ALL_ROWS):
            original(metric, *args_of_all, **kwargs_of_all)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _update(
        self,
        original: Callable[..., object],
        metric: Metric,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
    ) -> None:
        def with_all_rows() -> Tensor:
            self._update_with_all_rows(original, metric, args, kwargs)
            return tf.constant(True)

        def with_own_rows() -> Tensor:
            original(metric, *args, **kwargs)
            return tf.constant(True)

        unknown = tf.logical_not(self._trials.known(metric))
        tf.cond(unknown | self._see_all.of(metric), with_all_rows, with_own_rows)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _look(
        self,
        metric: Metric,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
        *,
        gathers: bool,
    ) -> None:
        """Find out how ``metric``, which is about to be updated, changes its state."""
        variables = list(metric.variables)
        observed = [self._of(metric, variable) for variable in variables]
        if all(one.kind is not None for one in observed):
            return
        for one in observed:
            one.gathers = gathers
        current = [tf.convert_to_tensor(variable.value) for variable in variables]
        places = [p for p, value in enumerate(current) if value.dtype != tf.bool]

        def update(values: Sequence[Tensor], given: Any) -> list[Tensor]:
            args, kwargs = given
            new_values = metric.stateless_update_state(list(values), *args, **kwargs)
            return [tf.convert_to_tensor(value) for value in new_values]

        def gather(given: Nest) -> Nest:
            what = f"rows for a test of the metric {metric.name}"
            return self._whole_batch.gather_nested(given, what) if gathers else given

        chosen = [observed[place] for place in places]
        wraps = internals.function_of(metric) is not None
        sees_all = self._see_all.of(metric)

        def judge(trials: Sequence[Trial]) -> list[bool]:
            for one, trial in zip(chosen, trials, strict=True):
                if gathers and wraps and _says_nothing(one, trial):
                    continue
                one.observe(trial, ROUNDING if gathers else CLOSE)
            if gathers:
                # The chief's state decides: the other ranks' may still be empty.
                signature = Signature(f"kind of the metric {metric.name}")
                take_kinds_of_chief(self._session.group, chosen, signature)
            sees_all = gathers and any(not self._can_be_merged(one) for one in chosen)
            if sees_all:
                for one in observed:
                    one.kind = _OF_ALL_ROWS
            elif wraps:
                self._judge_function(metric, chosen)
            known = all(one.kind is not None for one in chosen)
            return [known, sees_all, *(one.kind == _MEANS for one in chosen)]

        state = PythonState(metric) if tf.executing_eagerly() else None
        # If the metric does not support this kind of call, assume that it sums.
        with self._trials.attempt():
            given = args, dict(kwargs)
            flags = [sees_all, *(one.weighs for one in chosen)]
            self._trials.look(
                metric, update, current, places, given, judge, flags, gather
            )
        if state is None or not state.restore():
            return
        if gathers:
            self._take_all_rows(metric)
        else:
            self._warn_of_own_rows(metric, [args, dict(kwargs)])

    def _can_be_merged(self, one: _MetricVariable) -> bool:
        """Whether the ranks' values can be combined, as far as known."""
        kind = one.kind
        if kind is None or kind.running:
            return True
        # A median may happen to be the maximum of the halves' medians.
        return kind.how in ("mean", "sum") and kind.slope in (0.0, 1.0)

    def _judge_function(
        self, metric: Metric, chosen: Sequence[_MetricVariable]
    ) -> None:
        """Average a function's values if it is not a mean over rows.

        Called if the rows cannot be gathered, as with ``local_sgd`` or with shards.
        """
        for one in chosen:
            if one.kind is not None and one.how == "other":
                one.kind = _MEANS
                self._session.differs(
                    f"the metric {metric.name} is not a mean over the rows of a batch: "
                    "each rank computes it from its own rows, so its value differs "
                    "from that of one machine"
                )

    def weighed(self, variable: Variable, value: Tensor, current: Tensor) -> Tensor:
        """The value to assign: only this rank's part, if it is a mean over rows.

        ``value`` is what the metric assigns, and ``current`` is the variable's value;
        both have the same shape and dtype, and so has the result.
        """
        one = self._observed.get(variable)
        if one is None or self.trying or self.sees_all_rows:
            return value
        fraction = self.fraction()
        if fraction is None or not current.dtype.is_floating:
            return value
        part = current + (value - current) * tf.cast(fraction, current.dtype)
        return tf.where(one.weighs, part, value)

    def _of(self, metric: Metric, variable: Variable) -> _MetricVariable:
        def make() -> _MetricVariable:
            rule = declared_rule(metric, variable.name)
            return _MetricVariable(
                variable=weakref.ref(variable),
                weighs=new_flag(),
                kind=None if rule is None else Kind(rule, 1.0),
                declared=rule is not None,
            )

        return self._observed.of(variable, make)

    # --- of all ranks ---------------------------------------------------------------

    def merged(
        self,
        variables: Sequence[Variable],
        local: Sequence[Array],
        what: str,
        weight: float,
    ) -> list[Array]:
        """The values merged over all ranks, of the same shapes and dtypes.

        ``local`` are this rank's values, ``what`` names the exchange, and ``weight`` is
        this rank's weight in the last batch, in rows. All ranks must call this. Raises
        CollectiveMismatchError on all ranks if the variables differ, and another
        CollectiveError if a rank is lost or late.
        """
        session = self._session
        # Keras's aggregations; for variables of custom metrics, see ``_rule_for``.
        rules = [str(variable.aggregation) for variable in variables]
        signature = Signature(
            what,
            tuple(
                tensor_words(f"{variable.path} ({rule})", value.dtype, value.shape)
                for variable, value, rule in zip(variables, local, rules, strict=True)
            ),
        )
        found = [self._observed.get(variable) for variable in variables]
        observed = [one for one in found if one is not None]
        if agree_on_kinds(session.group, observed, signature):
            for one in observed:
                one.weighs.assign(one.kind == _MEANS)
        for place, known in enumerate(found):
            if known is not None and rules[place] in ("sum", "none"):
                rules[place] = self._rule_for(known, local[place])
        sums, extremes = [], []
        for value, rule in zip(local, rules, strict=True):
            excluded = rule in ("none", "only_first_replica") and not session.chief
            array = np.zeros_like(value) if excluded else value
            factor = weight if rule == "rows" else 1.0
            sums.append(_summable(array) if factor == 1.0 else array * factor)
            if rule in ("max", "min"):
                sign = 1.0 if rule == "max" else -1.0
                extremes.append(sign * np.asarray(value, np.float64))
        sums.append(np.array([weight]))
        *totals, weights = reduce_arrays(session.group, sums, ReduceOp.SUM, signature)
        maxima = iter(
            reduce_arrays(session.group, extremes, ReduceOp.MAX, signature)
            if extremes
            else ()
        )
        merged = []
        for total, value, rule in zip(totals, local, rules, strict=True):
            if rule in ("max", "min"):
                result = next(maxima) * (1.0 if rule == "max" else -1.0)
            elif rule == "mean":
                result = total / session.size
            elif rule == "rows":
                result = total / float(weights[0]) if weights[0] else value
            else:
                result = total
            merged.append(np.asarray(result).astype(value.dtype))
        return merged

    def _rule_for(self, one: _MetricVariable, value: Array) -> str:
        """How to combine the values: "max", "min", "sum" or "rows", a weighted mean.

        "only_first_replica" takes the chief's value.
        """
        kind = one.kind or _PLAIN
        if one.declared:
            return "rows" if kind.how == "mean" else kind.how
        unknown = one.kind is None and one.gathers and value.dtype != np.bool_
        if kind == _OF_ALL_ROWS or unknown:
            return "only_first_replica"
        if kind.how in ("max", "min"):
            return kind.how
        if kind == _MEANS:
            # Floats are sums of the ranks' parts; integers are the same on all ranks.
            return "max" if value.dtype.kind in "iu" else "sum"
        if kind.how == "mean":
            return "rows"
        if kind.how == "sum" and kind.slope in (0.0, 1.0):
            return "sum"
        self._session.differs(
            f"the value that a custom metric keeps in {name_of(one.variable())} is "
            "neither a sum, nor a mean, nor a maximum of rows: the ranks' values are "
            "summed, which may differ from the value on one machine"
        )
        return "sum"


def _update_of(metric: Metric) -> object:
    return getattr(type(metric), "update_state", None)


def _says_nothing(one: _MetricVariable, trial: Trial) -> bool:
    """Whether a function's values for both halves are the same, such as 0 or 1.

    Then their mean is the same value as well, whatever the function is.
    """
    variable = one.variable()
    of_values = variable is not None and variable.name == "total"
    return of_values and np.array_equal(trial.first, trial.second)


def _summable(array: Array) -> Array:
    if array.dtype == np.bool_:
        return array.astype(np.int64)
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return array.astype(np.float32)
    return array

"""The exchange between processes of which each has some ranks of a fixed number.

Sums have the same bits whichever ranks each process has; see ``Ranks.ordered``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.shard_sums import reduced_in_order
from tfcluster.runtime.partition.exchange import (
    BUCKET_BYTES,
    Request,
    gathered,
    numbers,
    words_of,
)
from tfcluster.runtime.partition.placement import Partial, Shard
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import Ref, Writer
from tfcluster.runtime.tensor_types import Array


class OrderedExchanger:
    """Exchanges by calls of a function on the host; see ``Exchanger``.

    ``program`` says in signatures which program exchanges. There are ``ranks`` in all.
    """

    bucket_bytes = BUCKET_BYTES
    words: Sequence[str] = ()
    """See ``Exchanger``."""

    def __init__(self, group: Group, program: str, ranks: int) -> None:
        self._group = group
        self._program = program
        self._ranks = ranks
        self._functions: list[HostFunction] = []
        """They must live as long as the ops that call them."""

    def write(self, writer: Writer, requests: Sequence[Request]) -> list[Ref]:
        """See ``Exchanger``."""
        what = f"exchange {len(self._functions) + 1} of {self._program}"
        # Processes have different numbers of terms, so these are no part of it.
        signature = Signature(what, words_of(requests))

        def run(*arrays: Array) -> list[Array]:
            rest = iter(arrays)
            terms = [list(itertools.islice(rest, len(each.terms))) for each in requests]
            results = self._exchanged(signature, requests, terms)
            return [np.asarray(each, order="C") for each in results]

        function = HostFunction(run)
        self._functions.append(function)
        return writer.op(
            "PyFunc",
            [[term for each in requests for term in each.terms]],
            {"token": function.token, "Tout": [each.ref.dtype for each in requests]},
            "exchange",
        )

    def _exchanged(
        self,
        signature: Signature,
        requests: Sequence[Request],
        terms: Sequence[list[Array]],
    ) -> list[Array]:
        """The whole tensors, given each one's terms, or its rows."""
        results = [first for first, *_ in terms]
        with self._group.exchange(signature) as call:
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN):
                places = [
                    place
                    for place, each in enumerate(requests)
                    if each.placement == Partial(op.value)
                ]
                given = [[numbers(term) for term in terms[i]] for i in places]
                found = reduced_in_order(call, given, op, self._ranks)
                for place, array in zip(places, found, strict=True):
                    results[place] = array.astype(results[place].dtype, copy=False)
            for place, each in enumerate(requests):
                if isinstance(each.placement, Shard):
                    rows = terms[place][0]
                    results[place] = gathered(call.transport, rows, each.placement)
        return results

"""What fails on one rank fails on all of them, as a program may catch the error.

An op that gets a rank's own rows may fail there only, such as a lookup of a wrong
index. The other ranks then wait for this one in an exchange of the program. It calls
another one there, from whose name they learn that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfcluster.runtime.collective import (
    CollectiveError,
    CollectiveMismatchError,
    Group,
    Signature,
)
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.partition.rewrite import Written

_FAILED = "an error in "
"""The beginning of the name of the exchange that a rank calls after an error."""


class Failures:
    """Raises the errors of programs on all ranks, which stay in step."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @contextmanager
    def running(self, label: str, written: Written) -> Iterator[None]:
        """See ``hook.Running``. Raises the first rank's error, if there are any."""
        before = self._group.mismatch
        try:
            yield
        except (tf.errors.OpError, CollectiveMismatchError) as error:
            if not written.exchanges or self._group.failure is not None:
                raise
            found = self._firsts(label, error, before)
            if found is None:
                raise
            raise found from None

    def _firsts(
        self, label: str, error: Exception, before: CollectiveMismatchError | None
    ) -> Exception | None:
        """The error of the first rank that has one; None if it is this rank's."""
        group, own = self._group, True
        mismatch = group.mismatch
        if mismatch is not None and mismatch is not before:
            # Another rank has called the exchange while this one was in the program.
            if _FAILED not in str(mismatch):
                return None
            own = str(mismatch) not in str(error)
        else:
            try:
                with group.exchange(Signature(f"{_FAILED}{label}")):
                    pass  # All ranks have failed.
            except CollectiveMismatchError:
                pass  # Now the others know it.
            except CollectiveError:
                return None
        text = error.message if isinstance(error, tf.errors.OpError) else str(error)
        ours = json.dumps([type(error).__name__, text] if own else None).encode()
        try:
            sent = allgather_bytes(group, ours, Signature(f"errors in {label}"))
        except CollectiveError:
            return None
        errors = [json.loads(each) for each in sent]
        rank = next((rank for rank, each in enumerate(errors) if each), group.rank)
        if rank == group.rank:
            return None
        kind, message = errors[rank]
        cls = getattr(tf.errors, kind, tf.errors.UnknownError)
        found: Exception = cls(None, None, message)
        return found

"""Observes how the program's own updates change variables.

``state_updates`` determines how an update changes a variable. Each rank observes only
its own updates, so the ranks compare what they have observed.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.keras.state.state_updates import (
    CLOSE,
    Kind,
    Trial,
    agreed,
    kind_of,
)
from tfcluster.runtime.keras.types import Variable


@dataclass(kw_only=True)
class ObservedVariable:
    """A variable that one of the program's own updates changes."""

    variable: weakref.ref[Variable]
    kind: Kind | None = None
    """None as long as the kind is unknown."""
    settled: bool = False
    """Whether all ranks know the kind and agree."""

    @property
    def how(self) -> str:
        """``Kind.how``; "other" as long as the kind is unknown."""
        return self.kind.how if self.kind is not None else "other"

    def observe(self, trial: Trial, close: float = CLOSE) -> None:
        """Determine the kind from a trial, unless it is known; see ``kind_of``."""
        self.kind = self.kind or kind_of(trial, close)


def agree_on_kinds(
    group: Group, observed: Sequence[ObservedVariable], signature: Signature
) -> bool:
    """Agree on the kinds with the other ranks, until all ranks know all kinds.

    All ranks must call this with the same variables at the same point. Returns whether
    the kinds had to be compared.
    """
    if all(one.settled for one in observed):
        return False
    ours = [None if one.kind is None else asdict(one.kind) for one in observed]
    texts = allgather_bytes(group, json.dumps(ours).encode(), signature)
    ranks = [json.loads(text) for text in texts]
    for place, one in enumerate(observed):
        kinds = [None if rank[place] is None else Kind(**rank[place]) for rank in ranks]
        one.kind = agreed(kinds)
        one.settled = None not in kinds
    return True


def take_kinds_of_chief(
    group: Group, observed: Sequence[ObservedVariable], signature: Signature
) -> None:
    """Set the kinds to those that the chief has observed.

    All ranks must call this with the same variables at the same point.
    """
    ours = [None if one.kind is None else asdict(one.kind) for one in observed]
    chief = json.loads(allgather_bytes(group, json.dumps(ours).encode(), signature)[0])
    for one, kind in zip(observed, chief, strict=True):
        one.kind = None if kind is None else Kind(**kind)

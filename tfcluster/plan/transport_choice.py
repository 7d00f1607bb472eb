"""Which transport ``transport: auto`` stands for, from the places of the ranks. Pure.

The launcher can only say what is possible: programs may hide GPUs from TensorFlow. So
the ranks themselves agree when they start, see ``runtime/collective/transports``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.model import Runtime, Strategy
from tfcluster.plan.placement import Place

AUTO, HOST, TENSORFLOW = "auto", "host", "tensorflow"


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it was chosen, as a part of a sentence."""

    transport: str
    """The transport; ``auto`` if it cannot be known yet."""
    reason: str


def chosen_transport(runtime: Runtime, places: Sequence[Place]) -> Choice:
    """The transport of a run whose tasks have these places.

    ``auto`` is ``tensorflow`` if each rank has a GPU that no other rank has, and
    otherwise ``host``.
    """
    if runtime.transport != AUTO:
        return Choice(runtime.transport, "as configured")
    if obstacle := _obstacle(runtime):
        return Choice(HOST, obstacle)
    ranks = [place for place in places if place.rank is not None]
    if len(ranks) < 2:
        return Choice(HOST, "there is only one rank")
    for place in ranks:
        if place.gpus == () or (place.gpus is None and place.host.gpus == ()):
            return Choice(HOST, f"{place.task} has no GPU")
    owners: dict[tuple[str, str], Place] = {}
    for place in ranks:
        for gpu in place.gpus_of_machine:
            other = owners.setdefault(gpu, place)
            if other is not place:
                shared = f"share GPU {gpu[1]} of {place.host.name}"
                return Choice(HOST, f"{other.task} and {place.task} {shared}")
    if any(place.gpus is None for place in ranks):
        return Choice(AUTO, "the GPUs of the hosts are not known yet")
    return Choice(TENSORFLOW, "each rank has a GPU to itself")


def _obstacle(runtime: Runtime) -> str:
    """Why ``auto`` is ``host`` on any GPUs; empty: nothing prevents ``tensorflow``."""
    if runtime.strategy is not Strategy.COLLECTIVE:
        return f"the strategy is {runtime.strategy}"
    if runtime.shards is not None:
        return "runtime.shards adds gradients in its own order"
    if runtime.shard_tables is not None:
        return "runtime.shard_tables needs it"
    if runtime.error_feedback:
        return "runtime.error_feedback needs it"
    return ""

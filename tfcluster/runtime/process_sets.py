"""Process sets, as in Horovod: groups of some ranks, with their own collectives.

Sets are added and removed on all ranks together, including those that are not members.
The members connect when a set is added, at the addresses from the launcher.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tfcluster.runtime import process_group
from tfcluster.runtime.collective import CollectiveError, Group, Signature
from tfcluster.runtime.collective.collectives import meet


class ProcessSet:
    """A set of ranks; usable in collectives after ``add_process_set``.

    ``ranks`` are numbers among all ranks, in any order; repetitions do not count. Two
    sets of the same ranks cannot both be added. Follows ``ProcessSet`` of
    horovod/common/process_sets.py.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks: Sequence[int] | None = sorted({int(rank) for rank in ranks})
        self.process_set_id: int | None = None
        """None before the set is added and after it is removed; 0: all ranks."""
        self._group: Group | None = None

    @property
    def ranks(self) -> list[int]:
        """The members, in ascending order. Raises NoRankError in a ps or data task."""
        return list(range(process_group.size()) if self._ranks is None else self._ranks)

    def included(self) -> bool:
        """Whether this process is a member. Raises NoRankError in a ps or data task."""
        return process_group.rank() in self.ranks

    def size(self) -> int:
        """The number of members. Raises NoRankError in a ps or data task."""
        return len(self.ranks)

    def rank(self) -> int:
        """The rank of this process in the set: its position in ``ranks``.

        Raises ValueError if it is not a member, and NoRankError in a ps or data task.
        """
        if not self.included():
            raise ValueError(f"rank {process_group.rank()} is not in {self!r}")
        return self.ranks.index(process_group.rank())

    def group(self) -> Group:
        """The process group of the members.

        Raises what ``require_added`` raises, CollectiveError before ``init``, and
        ValueError if this process is not a member.
        """
        self.require_added()
        if self.process_set_id == 0:
            return process_group.group()
        self.rank()
        assert self._group is not None
        return self._group

    def require_added(self) -> None:
        """Raise CollectiveError if the set has not been added, or is removed.

        Raises ValueError if the program has assigned ``process_set_id``.
        """
        number = self.process_set_id
        if number is None:
            raise CollectiveError(
                f"{self!r} has not been added: call add_process_set first"
            )
        if _added.get(number) is not self:
            raise ValueError(
                f"{self!r} has not been added: the program has set its process_set_id"
            )

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"

    def __str__(self) -> str:
        """What Horovod prints, for programs that read it."""
        number = self.process_set_id
        return f"ProcessSet(process_set_id={number}, ranks={self.ranks}, mpi_comm=None)"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__(())
        self._ranks = None
        self.process_set_id = 0


global_process_set = _GlobalProcessSet()
"""The process set of all ranks."""

_added: dict[int, ProcessSet] = {0: global_process_set}
_additions = 0
"""How many sets have ever been added: no two have a token in common."""


def init(
    comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None
) -> None:
    """Initialise the process group and add ``process_sets``; all ranks call this.

    Further calls add only sets that have not been added. ``comm`` is for Horovod's
    scripts: all ranks, or a communicator of mpi4py that has as many. Sets can also be
    added later, with or without ``process_sets="dynamic"``. Raises ValueError for other
    communicators and strings, and before any set is added if one is wrong or two have
    the same ranks; otherwise what ``process_group.init`` and ``add_process_set`` raise.
    Follows ``init`` of horovod/common/basics.py.
    """
    process_group.init()
    if comm is not None and not _is_everyone(comm):
        raise ValueError(
            "init(comm=...) would leave out ranks: launch fewer, or use a ProcessSet"
        )
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError('process_sets must be a list of ProcessSets or "dynamic"')
        return
    added = list(_added.values())
    new = [candidate for candidate in process_sets or () if candidate not in added]
    for index, candidate in enumerate(new):
        _check(candidate, new[:index])
    for candidate in new:
        add_process_set(candidate)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set and connect its members; all ranks have to call this.

    Returns the set, whose ``process_set_id`` is now the lowest that was free. Raises
    ValueError for ranks that do not exist, for no ranks, if the set has already been
    added, and if another set has the same ranks. Raises CollectiveMismatchError on all
    ranks if they add different sets, and another CollectiveError before ``init`` or if
    the members cannot be connected. Follows ``add_process_set`` of
    horovod/common/process_sets.py.
    """
    global _additions
    added = (
        process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    )
    _check(added)
    ranks = process_group.group()
    what = f"addition of the process set {added.ranks}"
    meet(ranks, Signature(what))
    _additions += 1
    if added.included():
        added._group = _connected(added, _additions)
    number = next(free for free in itertools.count() if free not in _added)
    added.process_set_id = number
    _added[number] = added
    # Otherwise members of the next set could connect at the same addresses.
    meet(ranks, Signature(f"{what}, connected"))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and disconnect its members; all ranks have to call this.

    Returns whether the set had been added. The set of all ranks cannot be removed.
    Raises CollectiveMismatchError on all ranks if they remove different sets, and
    another CollectiveError before ``init`` or if a rank is lost or late. Follows
    ``remove_process_set`` of horovod/common/process_sets.py.
    """
    number = process_set.process_set_id
    if not number:
        return False
    meet(
        process_group.group(),
        Signature(f"removal of the process set {process_set.ranks}"),
    )
    if process_set._group is not None:
        process_set._group.close()
        process_set._group = None
    del _added[number]
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each set that has been added, in ascending order, by its id.

    Id 0 is the set of all ranks. Raises NoRankError in a ps or data task.
    """
    return {number: process_set.ranks for number, process_set in _added.items()}


def process_set_included(process_set_id: int = 0) -> int:
    """1 if this process is in that set, else 0.

    Raises KeyError for an unknown id, and NoRankError in a ps or data task.
    """
    return int(_added[process_set_id].included())


def is_process_set_included(process_set: ProcessSet) -> bool:
    """Whether this process is a member of ``process_set``.

    Raises NoRankError in a ps or data task.
    """
    return process_set.included()


def process_set_of(number: int) -> ProcessSet:
    """The set with that id. Raises ValueError if there is none."""
    if number not in _added:
        raise ValueError(f"process set {number} does not exist")
    return _added[number]


def forget() -> None:
    """Remove and disconnect all sets except the set of all ranks, without agreement."""
    for number in [number for number in _added if number]:
        process_set = _added.pop(number)
        process_set.process_set_id = None
        if process_set._group is not None:
            process_set._group.close()
            process_set._group = None


def _is_everyone(comm: Any) -> bool:
    size = process_group.size()
    if hasattr(comm, "Get_size"):
        return bool(comm.Get_size() == size)
    return sorted(comm) in ([], list(range(size)))


def _check(added: ProcessSet, others: Iterable[ProcessSet] = ()) -> None:
    """Raise ValueError if ``added`` is wrong, or has the ranks of another set."""
    size = process_group.size()
    wrong = [rank for rank in added.ranks if not 0 <= rank < size]
    if wrong or not added.ranks:
        raise ValueError(f"ranks {wrong} do not exist: there are {size} ranks")
    if added.process_set_id is not None:
        raise ValueError(f"{added!r} has already been added")
    for other in (*_added.values(), *others):
        if other.ranks == added.ranks:
            raise ValueError(f"{other!r} already has the same ranks")


def _connected(added: ProcessSet, addition: int) -> Group:
    context = process_group.context()
    token = hashlib.sha256(b"process set %d " % addition + context.token).digest()
    return process_group.group_among(added.ranks, token)


process_group.at_shutdown(forget)

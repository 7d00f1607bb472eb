"""The service of a ps task: variables of models, notes and statistics.

One lock guards all state; connections do not wait for each other otherwise. If a task
leaves, even in the middle of a message, only its incomplete message is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tfcluster.protocol.task_events import Serving
from tfcluster.runtime.collective.transports.base import Array, Slices
from tfcluster.runtime.parameter_server.messages import Header, PsMessage
from tfcluster.runtime.parameter_server.sharding import (
    Gradient,
    Pushed,
    VariablePiece,
    difference,
    differing,
    whole_gradients,
)
from tfcluster.runtime.telemetry.tracer import UPDATES, tracer

if TYPE_CHECKING:
    from tfcluster.runtime.parameter_server.update_graph import Engine

_MANY_ROWS = 0.5
"""If more than this fraction of the rows has changed, the whole array is sent."""


@dataclass(slots=True)
class Counts:
    """Statistics of the gradients that arrived; staleness is counted in versions."""

    applied: int = 0
    dropped: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def apply(self, staleness: int) -> None:
        """Count a gradient that was computed ``staleness`` versions ago."""
        self.applied += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)


class ShardedModel:
    """The shards of one model on this ps; ``pieces`` keeps their order.

    All methods are called with the lock of the ps held, so that other threads see an
    update as a whole or not at all. Returned arrays do not change when later updates
    are applied.
    """

    def __init__(
        self, pieces: Sequence[VariablePiece], rows_only: Sequence[bool], engine: Engine
    ) -> None:
        self.pieces = tuple(pieces)
        self.engine = engine
        self.version = 0
        """The number of updates that have been applied."""
        self.counts = Counts()
        self._tracer = tracer()
        self._changed = [
            np.zeros(piece.end - piece.start, np.int64) if only else None
            for piece, only in zip(pieces, rows_only, strict=True)
        ]
        """For each ``rows_only`` shard, the version in which each row last changed."""
        self._latest: dict[int, Array] = {}
        """For each shard whose last gradient was sparse, the rows that it changed."""

    def apply(
        self, gradients: Sequence[Gradient], kinds: str, *, staleness: int = 0
    ) -> None:
        """Apply one step. The gradients were computed ``staleness`` versions ago.

        There is one gradient per shard, of the shard's shape. Raises KeyError if the
        engine does not know the update for ``kinds``.
        """
        gradients = [
            _with_own_indices(g) if isinstance(g, Slices) else g for g in gradients
        ]
        tracer = self._tracer
        if tracer is None:
            self.engine.apply(gradients, kinds)
        else:
            began_s = tracer.clock()
            self.engine.apply(gradients, kinds)
            tracer.add(UPDATES, "update", began_s, tracer.clock())
        self.version += 1
        self.counts.apply(staleness)
        self._latest = {}
        for index, (gradient, changed) in enumerate(
            zip(gradients, self._changed, strict=True)
        ):
            if changed is None or gradient is None:
                continue
            if isinstance(gradient, Slices):
                changed[gradient.indices] = self.version
                if are_distinct(gradient.indices):
                    self._latest[index] = gradient.indices
            else:
                changed[:] = self.version

    def changes_since(self, since: int) -> tuple[str, list[Array]]:
        """The changes since a version: a letter for each shard, and arrays.

        ``d``: the whole value; ``s``: the changed rows, then their indices; ``-``: no
        change and no array.
        """
        kinds, arrays = "", []
        for index, changed in enumerate(self._changed):
            if changed is None:
                kinds += "d"
                arrays.append(self.engine.read(index))
                continue
            if since == self.version - 1 and index in self._latest:
                rows = self._latest[index]
            else:
                rows = np.flatnonzero(changed > since)
            if len(rows) > _MANY_ROWS * len(changed):
                kinds += "d"
                arrays.append(self.engine.read(index))
            elif len(rows):
                kinds += "s"
                arrays += [self.engine.rows(index, rows), rows]
            else:
                kinds += "-"
        return kinds, arrays

    def values(self) -> list[Array]:
        """The current values of all shards, in their order."""
        return [self.engine.read(index) for index in range(len(self.pieces))]

    def assign(self, index: int, value: Array) -> None:
        """Set a shard; all tasks receive the new value with the next update."""
        self.engine.assign(index, value)
        self._latest.pop(index, None)
        changed = self._changed[index]
        if changed is not None:
            changed[:] = self.version + 1


def are_distinct(indices: Array) -> bool:
    """Whether no index repeats; ``indices`` are integers of shape (n,)."""
    ordered = np.sort(indices)
    return bool(np.all(ordered[1:] != ordered[:-1]))


def _with_own_indices(slices: Slices) -> Slices:
    """The slices with a copy of the indices, which are kept after this update."""
    return Slices(slices.values, slices.indices.copy(), slices.rows)


MakeEngine: TypeAlias = "Callable[[Sequence[Array]], Engine]"
"""Creates an engine whose variables have these initial values."""

_DONE = PsMessage({})


class RefusedError(Exception):
    """A request that fails; ``kind`` selects the error that the client raises."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True)
class _SynchronousStep:
    """One step of a model with synchronous updates."""

    pushed: dict[int, Pushed] = field(default_factory=dict)
    done: bool = False
    error: RefusedError | None = None


@dataclass(slots=True)
class _ServedModel:
    facts: Header
    """The model's signature, which has to be equal on all tasks."""
    shards: ShardedModel
    shapes: Sequence[Sequence[int]]
    """The shapes of the pieces."""
    step: _SynchronousStep = field(default_factory=_SynchronousStep)


class Service:
    """The state of one ps. Each connection has a thread, which calls ``answer``."""

    def __init__(self, size: int, make_engine: MakeEngine) -> None:
        self._size = size
        self._make_engine = make_engine
        self._models: dict[str, _ServedModel] = {}
        self._definers: dict[str, object] = {}
        self._notes: dict[str, str] = {}
        self._lock = threading.Condition()
        self.gradient_arrived = threading.Event()
        """Set when a gradient has arrived."""
        self._disconnected: set[int] = set()
        self._connections: dict[int, object] = {}
        self._handlers = {
            "open": self._open,
            "define": self._define,
            "has_update": self._has_update,
            "add_update": self._add_update,
            "push": self._push,
            "pull": self._pull,
            "slots": self._slots,
            "assign": self._assign,
            "put": self._put,
            "get": self._get,
        }

    def connected(self, rank: int, connection: object) -> None:
        """Record that a task has connected; ``connection`` identifies it."""
        with self._lock:
            self._connections[rank] = connection
            self._disconnected.discard(rank)

    def disconnected(self, rank: int, connection: object) -> None:
        """Record that a task has disconnected, and wake the tasks that wait for it."""
        with self._lock:
            if self._connections.get(rank) is connection:
                del self._connections[rank]
                self._disconnected.add(rank)
            for model in [m for m, c in self._definers.items() if c is connection]:
                del self._definers[model]
            self._lock.notify_all()

    def answer(
        self,
        rank: int,
        connection: object,
        request: PsMessage,
        copy_arrays: Callable[[PsMessage], PsMessage] = lambda answer: answer,
    ) -> PsMessage:
        """The answer to a request. Raises RefusedError if it cannot be fulfilled.

        Raises KeyError and ValueError for a malformed request, and what an update
        raises. ``copy_arrays`` is called with the answer while the lock is held, and
        may copy its arrays before another update is applied.
        """
        handler = self._handlers.get(request.header.get("op", ""))
        if handler is None:
            raise RefusedError("failed", "unknown request")
        with self._lock:
            return copy_arrays(handler(rank, connection, request))

    def release(self, model: str) -> None:
        """Make variables that share a gradient's memory copy it; see ``Engine``.

        Raises KeyError for an unknown model.
        """
        with self._lock:
            self._models[model].shards.engine.release()

    def statistics(self) -> Serving:
        """The statistics of all models together."""
        with self._lock:
            return _totals([model.shards for model in self._models.values()])

    # --- models ---------------------------------------------------------------------

    def _open(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        """Answer with the values, or tell the first task to define the model.

        Other tasks wait here until the first task has done so. The ranks of a
        synchronous model train the chief's values, so only the chief defines it.
        """
        name = request.header["model"]
        others_may = rank == 0 or not request.header["facts"]["synchronous"]
        while name not in self._models:
            if not others_may and 0 in self._disconnected:
                raise _left(0)
            if others_may and name not in self._definers:
                self._definers[name] = connection
                return PsMessage({"do": "define"})
            self._lock.wait()
        model = self._models[name]
        if difference := differing(model.facts, request.header["facts"], rank):
            raise RefusedError("mismatch", difference)
        shards = model.shards
        return PsMessage({"do": "use", "version": shards.version}, shards.values())

    def _define(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        header = request.header
        graph, *values = request.arrays
        engine = self._make_engine(values)
        pieces = [VariablePiece(*piece) for piece in header["pieces"]]
        rows_only = [header["facts"]["rows_only"][piece.variable] for piece in pieces]
        shards = ShardedModel(pieces, rows_only, engine)
        if graph.size:
            engine.define(graph.tobytes())
        shapes = [value.shape for value in values]
        self._models[header["model"]] = _ServedModel(header["facts"], shards, shapes)
        self._definers.pop(header["model"], None)
        self._lock.notify_all()
        return _DONE

    def _model(self, request: PsMessage) -> _ServedModel:
        name = request.header["model"]
        if name not in self._models:
            raise RefusedError("failed", f"no task has opened {name!r} here")
        return self._models[name]

    def _has_update(
        self, rank: int, connection: object, request: PsMessage
    ) -> PsMessage:
        engine = self._model(request).shards.engine
        return PsMessage({"found": engine.knows(request.header["kinds"])})

    def _add_update(
        self, rank: int, connection: object, request: PsMessage
    ) -> PsMessage:
        self._model(request).shards.engine.define(request.arrays[0].tobytes())
        return _DONE

    # --- gradients ------------------------------------------------------------------

    def _push(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        header = request.header
        model = self._model(request)
        gradients = gradients_of(header["kinds"], request.arrays)
        since = int(header["version"])
        self.gradient_arrived.set()
        pushed = Pushed(header["kinds"], gradients)
        if not model.facts["synchronous"]:
            staleness = max(0, model.shards.version - since)
            model.shards.apply(gradients, pushed.kinds, staleness=staleness)
        elif since < model.shards.version:
            model.shards.counts.dropped += 1
        else:
            self._push_in_step(rank, model, pushed)
        return _changes_since(model.shards, since)

    def _push_in_step(self, rank: int, model: _ServedModel, pushed: Pushed) -> None:
        """Add a rank's part to the current step; return when the step is complete."""
        step = model.step
        step.pushed[rank] = pushed
        if len(step.pushed) == self._size:
            model.step = _SynchronousStep()
            try:
                if unlike := difference(step.pushed):
                    raise RefusedError("mismatch", f"gradients differ: {unlike}")
                model.shards.apply(
                    whole_gradients(step.pushed, model.shapes), pushed.kinds
                )
            except RefusedError as error:
                step.error = error
            except Exception as error:
                # All ranks wait for this step, so all get the error.
                step.error = RefusedError("failed", str(error))
            step.done = True
            # Threads of other ranks still hold the step: drop the gradients now.
            step.pushed = {}
            self._lock.notify_all()
        while not step.done:
            if missing := sorted(self._disconnected - step.pushed.keys()):
                step.pushed.pop(rank, None)
                raise _left(missing[0])
            self._lock.wait()
        if step.error is not None:
            raise RefusedError(step.error.kind, str(step.error))

    def _pull(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        shards = self._model(request).shards
        return PsMessage({"version": shards.version}, shards.values())

    # --- slot variables --------------------------------------------------------------

    def _slots(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        slots = self._model(request).shards.engine.slots()
        return PsMessage({"paths": list(slots)}, list(slots.values()))

    def _assign(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        shards = self._model(request).shards
        target = request.header["target"]
        if isinstance(target, int):
            shards.assign(target, request.arrays[0])
            return PsMessage({"found": True})
        try:
            shards.engine.assign_slot(target, request.arrays[0])
        except KeyError:
            return PsMessage({"found": False})
        return PsMessage({"found": True})

    # --- notes ------------------------------------------------------------------------

    def _put(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        self._notes[request.header["key"]] = request.header["text"]
        return _DONE

    def _get(self, rank: int, connection: object, request: PsMessage) -> PsMessage:
        return PsMessage({"text": self._notes.get(request.header["key"])})


def gradients_of(kinds: str, arrays: Sequence[Array]) -> list[Gradient]:
    """The gradients of these kinds (see ``client.Pack``), from their arrays.

    ``d`` takes one array, ``s`` takes two (values, indices), and ``-`` takes none.
    """
    rest = iter(arrays)
    gradients: list[Gradient] = []
    for kind in kinds:
        if kind == "-":
            gradients.append(None)
        elif kind == "s":
            values = next(rest)
            gradients.append(Slices(values, next(rest)))
        else:
            gradients.append(next(rest))
    return gradients


def _left(rank: int) -> RefusedError:
    return RefusedError(
        "lost",
        f"rank {rank} has left: its process ended or the connection to it broke",
    )


def _changes_since(shards: ShardedModel, since: int) -> PsMessage:
    kinds, arrays = shards.changes_since(since)
    return PsMessage({"version": shards.version, "kinds": kinds}, arrays)


def _totals(models: Sequence[ShardedModel]) -> Serving:
    counts = [model.counts for model in models]
    applied = sum(count.applied for count in counts)
    staleness = sum(count.staleness_sum for count in counts)
    return Serving(
        applied=applied,
        dropped=sum(count.dropped for count in counts),
        staleness_mean=round(staleness / applied, 4) if applied else 0.0,
        staleness_max=max((count.staleness_max for count in counts), default=0),
        bytes=sum(model.engine.held_bytes for model in models),
    )

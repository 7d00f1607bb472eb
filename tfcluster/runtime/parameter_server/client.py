"""The training task's client of the ps tasks: push gradients, get current weights.

Numpy only. Thread-safe; one exchange happens at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tfcluster.runtime.collective.transports.base import Array, Slices
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
)
from tfcluster.runtime.parameter_server.connections import Connections
from tfcluster.runtime.parameter_server.messages import Header, PsMessage, padded
from tfcluster.runtime.parameter_server.sharding import (
    Gradient,
    ModelVariable,
    Placement,
    Rows,
    Share,
    VariablePiece,
    bytes_of,
    facts_of,
    joined,
    joined_slots,
    part_of,
    placed,
    pushed_part,
)
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.telemetry.tracer import EXCHANGES, tracer

__all__ = [
    "ModelVariable",
    "OpenResult",
    "Pack",
    "ParameterServerClient",
    "Rows",
    "Slices",
    "VariablePiece",
]

Pack: TypeAlias = Callable[[Sequence[VariablePiece], str], bytes]
"""Serialises the update of one ps's pieces (``update_graph.serialised``) for gradients
of these kinds. Each piece has a letter: ``d`` for an array, ``s`` for Slices, ``-`` for
no gradient."""


_ERRORS = {"mismatch": CollectiveMismatchError, "lost": PeerLostError}


@dataclass(frozen=True, slots=True)
class OpenResult:
    """The state of a model on the ps tasks: see ``ParameterServerClient.open``."""

    values: list[Array]
    """The variables' current values, in the model's order."""
    version: int
    """The number of steps that had been applied before."""
    defined: bool
    """Whether this task's values became the initial values."""
    placement: Placement


@dataclass(slots=True)
class _OpenedModel:
    """This task's state of a model that it has opened."""

    variables: tuple[ModelVariable, ...]
    placement: Placement
    pack: Pack
    versions: list[int]
    """The last version of each ps that this task has seen."""
    share: Share | None
    """The part of the next gradients that this task sends; None for all.

    The chief's values define a model, so only the chief's first gradients count.
    """
    updates: set[tuple[int, str]] = field(default_factory=set)
    """Pairs: a ps, and kinds of gradients for which it has an update."""

    @property
    def used(self) -> list[int]:
        """The indices of the ps tasks that hold a part of this model."""
        return [ps for ps, pieces in enumerate(self.placement) if pieces]


class ParameterServerClient:
    """A client of all ps tasks.

    All methods raise PeerLostError if a ps is gone, CollectiveTimeoutError if a ps does
    not answer for ``stall_timeout_s`` seconds (None: never), and CollectiveError for
    failures on a ps. After a lost connection or a timeout, all later calls raise the
    same error. Methods with a ``model`` raise KeyError if this client has not opened
    it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        rank: int,
        size: int,
        token: bytes,
        timeout_s: float = 60.0,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Connect to all ps tasks.

        ``addresses`` are ``host:port`` in the order of the ps tasks; ``rank`` of
        ``size`` is this task, and ``token`` is the run's secret. Raises
        CollectiveTimeoutError after ``timeout_s`` seconds, and CollectiveError for a
        malformed address.
        """
        self._lock = threading.Lock()
        self._tracer = tracer()
        self._models: dict[str, _OpenedModel] = {}
        self._rank, self._size = rank, size
        self._connections = Connections(
            addresses,
            rank=rank,
            size=size,
            token=token,
            join_timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
        )

    @property
    def waited_s(self) -> float:
        """Seconds that this task has waited for answers."""
        return self._connections.waited_s

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of arrays sent and received, including those in shared memory."""
        return self._connections.exchanged_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over sockets, without those in shared memory."""
        return self._connections.sent_bytes

    def open(
        self,
        model: str,
        variables: Sequence[ModelVariable],
        values: Sequence[Array],
        kinds: str,
        pack: Pack,
        *,
        synchronous: bool = False,
        splittable: bool = False,
        together: bool = False,
    ) -> OpenResult:
        """Create ``model`` on the ps tasks; the first task to call gives the values.

        In a synchronous model that is the chief, and the others wait for it.

        ``values[i]`` has the shape and dtype of ``variables[i]``, and so have the
        results. ``kinds`` are the kinds of the expected gradients, a letter for each
        variable: see ``Pack``. ``pack`` is called now, and later for other kinds, if a
        ps lacks the update; its exceptions are passed on. ``synchronous``: a step
        applies one gradient, of which each task sends a part. ``splittable``: rows may
        be updated separately, so variables may be sharded. ``together``: the update
        needs all gradients at once, so one ps gets them all.

        Raises CollectiveMismatchError if the variables or options differ between the
        tasks.
        """
        servers = self._connections.count
        placement = placed(variables, servers, splittable=splittable, together=together)
        share = Share(0 if self._rank == 0 else -1, 1) if synchronous else None
        state = _OpenedModel(tuple(variables), placement, pack, [0] * servers, share)
        facts = facts_of(
            variables,
            synchronous=synchronous,
            splittable=splittable,
            together=together,
            servers=servers,
        )
        request = PsMessage({"op": "open", "model": model, "facts": facts})
        with self._turn():
            # ps:0 decides which task defines the model, so one task gives all values.
            answers = self._request({0: request})
            defined = answers[0].header["do"] == "define"
            if defined:
                self._define(model, state, facts, values, kinds)
                current = list(values)
            else:
                others = [ps for ps in state.used if ps != 0]
                answers |= self._request(dict.fromkeys(others, request))
                current = _values(state, answers)
                for ps, answer in answers.items():
                    state.versions[ps] = answer.header["version"]
            self._connections.share_memory(model, _message_sizes(state))
            self._models[model] = state
        version = max(state.versions)
        return OpenResult(current, version, defined, placement)

    def push(
        self, model: str, gradients: Sequence[Gradient]
    ) -> list[Array | Rows | None]:
        """Push gradients to be applied; return the updated variables.

        Arguments and results are in the model's order; a gradient has the shape and
        dtype of its variable, or is the Slices of some of its rows. An item of the
        result is the whole variable, the Rows that changed, or None if nothing has
        changed since this task last saw it. In a synchronous model all tasks push the
        same gradients, of which each sends a part; this returns once they have been
        applied. Raises IndexError for an index beyond a variable's rows, and
        CollectiveMismatchError if the ranks' gradients are of different kinds. Other
        steps follow Downpour SGD (Dean et al., 2012).
        """
        with self._turn():
            state = self._models[model]
            requests = {}
            for ps in state.used:
                pieces = state.placement[ps]
                kinds, arrays = pushed_part(state.variables, pieces, gradients)
                if state.share is not None:
                    arrays = state.share.of(kinds, arrays)
                self._send_update_if_missing(model, state, ps, kinds)
                header = {
                    "op": "push",
                    "model": model,
                    "version": state.versions[ps],
                    "kinds": kinds,
                }
                channel = self._connections.channels[ps]
                requests[ps] = channel.with_shared_buffers(
                    model, PsMessage(header, arrays)
                )
            answers = self._request(requests)
            if state.share is not None:
                state.share = Share(self._rank, self._size)
            for ps, answer in answers.items():
                state.versions[ps] = answer.header["version"]
            return joined(
                state.variables,
                {
                    ps: (state.placement[ps], answer.header["kinds"], answer.arrays)
                    for ps, answer in answers.items()
                },
            )

    def pull(self, model: str) -> list[Array]:
        """Pull all variables: their current values, in the model's order.

        They have the variables' shapes and dtypes.
        """
        with self._turn():
            state = self._models[model]
            request = PsMessage({"op": "pull", "model": model})
            answers = self._request(dict.fromkeys(state.used, request))
            for ps, answer in answers.items():
                state.versions[ps] = answer.header["version"]
            return _values(state, answers)

    def slots(self, model: str) -> dict[str, Array]:
        """The optimizer's slot variables by path, with shards joined.

        Each has the shape and dtype of the optimizer's own slot. Slots of a split
        variable are recognised by the variable's path (with ``_`` for ``/``), which
        Keras includes in the slot's path.
        """
        with self._turn():
            state = self._models[model]
            request = PsMessage({"op": "slots", "model": model})
            answers = self._request(dict.fromkeys(state.used, request))
        return joined_slots(
            state.variables,
            {
                ps: (
                    state.placement[ps],
                    dict(zip(answer.header["paths"], answer.arrays, strict=True)),
                )
                for ps, answer in answers.items()
            },
        )

    def assign(self, model: str, path: str, value: Array) -> None:
        """Set a model variable or a slot variable on the ps tasks that hold it.

        ``value`` has the variable's shape and dtype. Raises KeyError if no variable has
        that path.
        """
        value = np.asarray(value)
        with self._turn():
            state = self._models[model]
            requests = {}
            for ps in state.used:
                target, part = part_of(
                    state.variables, state.placement[ps], path, value
                )
                if target is not None:
                    header = {"op": "assign", "model": model, "target": target}
                    requests[ps] = PsMessage(header, [part])
            answers = self._request(requests)
        if not any(answer.header["found"] for answer in answers.values()):
            raise KeyError(path)

    def put(self, key: str, text: str) -> None:
        """Store ``text`` under ``key`` on ps:0, for other tasks to read."""
        self._note({"op": "put", "key": key, "text": text})

    def get(self, key: str) -> str | None:
        """The text stored under ``key``; None if there is none."""
        text = self._note({"op": "get", "key": key})["text"]
        return None if text is None else str(text)

    def close(self) -> None:
        """Close the connections to all ps tasks; later calls fail."""
        self._connections.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A context in which this thread alone exchanges.

        A handler of a signal, which may exchange, too, runs before or after it.
        """
        with SIGNALS.elsewhere(), self._lock:
            yield

    def _note(self, header: Header) -> Header:
        with self._turn():
            return self._request({0: PsMessage(header)})[0].header

    def _define(
        self,
        model: str,
        state: _OpenedModel,
        facts: Header,
        values: Sequence[Array],
        kinds: str,
    ) -> None:
        """Send the model to all ps; ps:0 comes last, as it lets other tasks proceed."""
        servers = self._connections.count
        for ps in [*(ps for ps in state.used if ps != 0), 0][:servers]:
            pieces = state.placement[ps]
            piece_kinds = "".join(kinds[piece.variable] for piece in pieces)
            graph = state.pack(pieces, piece_kinds) if pieces else b""
            parts = [
                values[p.variable] if p.whole else values[p.variable][p.start : p.end]
                for p in pieces
            ]
            header = {
                "op": "define",
                "model": model,
                "facts": facts,
                "pieces": [[p.variable, p.start, p.end, p.whole] for p in pieces],
            }
            self._request(
                {ps: PsMessage(header, [np.frombuffer(graph, np.uint8), *parts])}
            )
            state.updates.add((ps, piece_kinds))

    def _send_update_if_missing(
        self, model: str, state: _OpenedModel, ps: int, kinds: str
    ) -> None:
        """Send a ps the update for these kinds of gradients, if it lacks it."""
        if (ps, kinds) in state.updates:
            return
        fields = {"model": model, "kinds": kinds}
        if not self._request({ps: PsMessage({"op": "has_update", **fields})})[
            ps
        ].header["found"]:
            graph = np.frombuffer(state.pack(state.placement[ps], kinds), np.uint8)
            self._request({ps: PsMessage({"op": "add_update", **fields}, [graph])})
        state.updates.add((ps, kinds))

    def _request(self, requests: Mapping[int, PsMessage]) -> dict[int, PsMessage]:
        answers = self._exchanged(requests)
        for ps in sorted(answers):
            kind = answers[ps].header.get("error")
            if kind is not None:
                error = _ERRORS.get(kind, CollectiveError)
                raise error(f"ps:{ps}: {answers[ps].header['text']}")
        return answers

    def _exchanged(self, requests: Mapping[int, PsMessage]) -> dict[int, PsMessage]:
        tracer = self._tracer
        if tracer is None:
            answers = self._connections.exchange(requests)
        else:
            began_s, waited_s = tracer.clock(), self.waited_s
            answers = self._connections.exchange(requests)
            ended_s, waited_s = tracer.clock(), self.waited_s - waited_s
            if name := _named(requests):
                size = _size(requests) + _size(answers)
                tracer.add(EXCHANGES, name, began_s, ended_s, size, "ps", waited_s)
        return answers


def _named(requests: Mapping[int, PsMessage]) -> str:
    """The request's name for the tracer; empty for notes, which are read repeatedly."""
    for request in requests.values():
        model = request.header.get("model")
        return "" if model is None else f"{request.header['op']} {model}"
    return ""


def _size(messages: Mapping[int, PsMessage]) -> int:
    return sum(
        array.nbytes for message in messages.values() for array in message.arrays
    )


def _values(model: _OpenedModel, answers: Mapping[int, PsMessage]) -> list[Array]:
    """Join whole variables from answers that have all their shards."""
    values = joined(
        model.variables,
        {
            ps: (model.placement[ps], "d" * len(model.placement[ps]), answer.arrays)
            for ps, answer in answers.items()
        },
    )
    return [array for array in values if isinstance(array, np.ndarray)]


def _message_sizes(model: _OpenedModel) -> dict[int, int]:
    """For each ps, the size in bytes of a message with all its pieces, all dense."""
    return {
        ps: sum(padded(bytes_of(model.variables, piece)) for piece in pieces)
        for ps, pieces in enumerate(model.placement)
        if pieces
    }

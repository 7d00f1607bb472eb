"""What a training task knows of the ps tasks: push gradients, get fresh weights.

Numpy only. Safe to use from several threads; one exchange at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
)
from tfcluster.runtime.parameter_server.connections import Connections
from tfcluster.runtime.parameter_server.messages import Message, padded
from tfcluster.runtime.parameter_server.model_signature import facts_of
from tfcluster.runtime.parameter_server.placement import (
    Piece,
    Placement,
    Variable,
    bytes_of,
    placed,
)
from tfcluster.runtime.parameter_server.sharding import (
    Gradient,
    Rows,
    joined,
    joined_slots,
    part_of,
    pushed_part,
)

__all__ = ["Opened", "Pack", "Piece", "Rows", "Servers", "Slices", "Variable"]

Array = NDArray[Any]
Pack = Callable[[Sequence[Piece], str], bytes]
"""The update of one ps' pieces as ``graphs.serialised`` gives it, for gradients of
these kinds: a letter for each piece, ``d`` an array, ``s`` Slices, ``-`` none."""


_ERRORS = {"mismatch": CollectiveMismatchError, "lost": PeerLostError}


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose master copy the ps tasks have."""

    values: list[Array]
    """What the variables are to be now, in the model's order."""
    version: int
    """Steps that had been applied before."""
    defined: bool
    """This task's values became the first ones."""
    placement: Placement


@dataclass(slots=True)
class _Model:
    """What this task knows of a model that it has opened."""

    variables: tuple[Variable, ...]
    placement: Placement
    pack: Pack
    versions: list[int]
    """Of each ps: what this task has seen last."""
    known: set[tuple[int, str]] = field(default_factory=set)
    """A ps, and kinds of gradients that it has an update for."""

    @property
    def used(self) -> list[int]:
        """The ps that have something of it."""
        return [ps for ps, pieces in enumerate(self.placement) if pieces]


class Servers:
    """This task's connections to all ps tasks."""

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
        """Connect. Raises CollectiveTimeoutError where one does not come in time."""
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
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
        return self._connections.waited_s

    @property
    def sent_bytes(self) -> int:
        return self._connections.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._connections.received_bytes

    def open(
        self,
        model: str,
        variables: Sequence[Variable],
        values: Sequence[Array],
        kinds: str,
        pack: Pack,
        *,
        synchronous: bool = False,
        splittable: bool = False,
        together: bool = False,
    ) -> Opened:
        """Have the ps tasks keep ``model``; whoever comes first gives it its values.

        ``kinds`` are those of the gradients that will be pushed, as far as is known (a
        letter for each variable): ``pack`` is called, within this call and later, for
        what the ps tasks lack. ``splittable``: each row may be updated by itself.
        ``together``: the update needs all gradients at once, so one ps gets all.

        Raises CollectiveMismatchError where the variables are not those of the others.
        """
        servers = self._connections.count
        placement = placed(variables, servers, splittable=splittable, together=together)
        opened = _Model(tuple(variables), placement, pack, [0] * servers)
        facts = facts_of(
            variables,
            synchronous=synchronous,
            splittable=splittable,
            together=together,
            servers=servers,
        )
        request = Message({"op": "open", "model": model, "facts": facts})
        with self._lock:
            # The first one decides who defines it: the values are all of one task.
            answers = self._ask({0: request})
            defined = answers[0].header["do"] == "define"
            if defined:
                self._define(model, opened, facts, values, kinds)
                found = list(values)
            else:
                others = [ps for ps in opened.used if ps != 0]
                answers |= self._ask(dict.fromkeys(others, request))
                found = _values(opened, answers)
                for ps, answer in answers.items():
                    opened.versions[ps] = answer.header["version"]
            self._connections.share(model, _message_sizes(opened))
            self._models[model] = opened
        version = max(opened.versions)
        return Opened(found, version, defined, placement)

    def push(
        self, model: str, gradients: Sequence[Gradient], *, weight: float = 1.0
    ) -> list[Array | Rows | None]:
        """Have gradients applied; what the variables are then, in the model's order.

        None for a variable that nobody has changed since this task last saw it.
        Synchronous: returns once all tasks have pushed and the mean was applied.
        """
        with self._lock:
            found = self._models[model]
            requests = {}
            for ps in found.used:
                pieces = found.placement[ps]
                kinds, arrays = pushed_part(found.variables, pieces, gradients)
                self._teach(model, found, ps, kinds)
                header = {
                    "op": "push",
                    "model": model,
                    "version": found.versions[ps],
                    "weight": weight,
                    "kinds": kinds,
                }
                sharing = self._connections.sharing[ps]
                requests[ps] = sharing.placed(model, Message(header, arrays))
            answers = self._ask(requests)
            for ps, answer in answers.items():
                found.versions[ps] = answer.header["version"]
            return joined(
                found.variables,
                {
                    ps: (found.placement[ps], answer.header["kinds"], answer.arrays)
                    for ps, answer in answers.items()
                },
            )

    def pull(self, model: str) -> list[Array]:
        """All variables as they are now."""
        with self._lock:
            found = self._models[model]
            request = Message({"op": "pull", "model": model})
            answers = self._ask(dict.fromkeys(found.used, request))
            for ps, answer in answers.items():
                found.versions[ps] = answer.header["version"]
            return _values(found, answers)

    def slots(self, model: str) -> dict[str, Array]:
        """The optimizer's own variables by path, pieces put together.

        Where a variable is split, a slot of it is told by the variable's path in its
        own (with ``_`` for ``/``), as Keras names them.
        """
        with self._lock:
            found = self._models[model]
            request = Message({"op": "slots", "model": model})
            answers = self._ask(dict.fromkeys(found.used, request))
        return joined_slots(
            found.variables,
            {
                ps: (
                    found.placement[ps],
                    dict(zip(answer.header["paths"], answer.arrays, strict=True)),
                )
                for ps, answer in answers.items()
            },
        )

    def assign(self, model: str, path: str, value: Array) -> None:
        """Set a variable, or one of the optimizer's own, wherever it is.

        Raises KeyError where there is none of that path.
        """
        value = np.asarray(value)
        with self._lock:
            found = self._models[model]
            requests = {}
            for ps in found.used:
                place, part = part_of(found.variables, found.placement[ps], path, value)
                if place is not None:
                    header = {"op": "assign", "model": model, "place": place}
                    requests[ps] = Message(header, [part])
            answers = self._ask(requests)
        if not any(answer.header["known"] for answer in answers.values()):
            raise KeyError(path)

    def put(self, key: str, text: str) -> None:
        """Leave a note for the others (on ps:0)."""
        self._note({"op": "put", "key": key, "text": text})

    def get(self, key: str) -> str | None:
        """The note of that name."""
        text = self._note({"op": "get", "key": key})["text"]
        return None if text is None else str(text)

    def notes(self, prefix: str = "") -> dict[str, str]:
        """All notes whose names begin so."""
        return dict(self._note({"op": "notes", "prefix": prefix})["notes"])

    def statistics(self) -> list[Mapping[str, Any]]:
        """Of each ps: steps applied, dropped, their staleness, the bytes it holds."""
        request = Message({"op": "statistics"})
        with self._lock:
            everywhere = range(self._connections.count)
            answers = self._ask(dict.fromkeys(everywhere, request))
        return [answers[ps].header for ps in sorted(answers)]

    def close(self) -> None:
        """Hang up."""
        self._connections.close()

    def _note(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            return self._ask({0: Message(header)})[0].header

    def _define(
        self,
        model: str,
        opened: _Model,
        facts: Mapping[str, Any],
        values: Sequence[Array],
        kinds: str,
    ) -> None:
        """ps:0 comes last: with it, the others may begin."""
        servers = self._connections.count
        for ps in [*(ps for ps in opened.used if ps != 0), 0][:servers]:
            pieces = opened.placement[ps]
            letters = "".join(kinds[piece.variable] for piece in pieces)
            graph = opened.pack(pieces, letters) if pieces else b""
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
            self._ask({ps: Message(header, [np.frombuffer(graph, np.uint8), *parts])})
            opened.known.add((ps, letters))

    def _teach(self, model: str, found: _Model, ps: int, kinds: str) -> None:
        """See to it that a ps has an update for these kinds of gradients."""
        if (ps, kinds) in found.known:
            return
        about = {"model": model, "kinds": kinds}
        if not self._ask({ps: Message({"op": "ask", **about})})[ps].header["known"]:
            graph = np.frombuffer(found.pack(found.placement[ps], kinds), np.uint8)
            self._ask({ps: Message({"op": "learn", **about}, [graph])})
        found.known.add((ps, kinds))

    def _ask(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        answers = self._connections.exchange(requests)
        for ps in sorted(answers):
            kind = answers[ps].header.get("error")
            if kind is not None:
                error = _ERRORS.get(kind, CollectiveError)
                raise error(f"ps:{ps}: {answers[ps].header['text']}")
        return answers


def _values(model: _Model, answers: Mapping[int, Message]) -> list[Array]:
    """Whole variables, of which the answers have all pieces."""
    found = joined(
        model.variables,
        {
            ps: (model.placement[ps], "d" * len(model.placement[ps]), answer.arrays)
            for ps, answer in answers.items()
        },
    )
    return [array for array in found if isinstance(array, np.ndarray)]


def _message_sizes(model: _Model) -> dict[int, int]:
    """Of each ps: what all its pieces take in a message, none of them as rows."""
    return {
        ps: sum(padded(bytes_of(model.variables, piece)) for piece in pieces)
        for ps, pieces in enumerate(model.placement)
        if pieces
    }

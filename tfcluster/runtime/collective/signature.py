"""The signature of a collective operation. Ranks compare it before they start. Pure.

Horovod's controller (horovod/common/controller.cc) compares requests in the same way.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tfcluster.protocol.wire import loads

_MAX_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature: ``what`` is done (``gradients of adam``) and to which tensors.

    ``tensors`` holds one ``tensor_words`` per tensor, in the order of the operation.
    """

    what: str
    tensors: tuple[str, ...] = ()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the signature, 32 bytes."""
        return _digest(self)

    def encoded(self) -> bytes:
        """The signature as JSON."""
        return json.dumps([self.what, *self.tensors]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Signature:
        """The inverse of ``encoded``. Raises ValueError or TypeError for other data."""
        what, *tensors = map(str, loads(data))
        return cls(what, tuple(tensors))


@functools.lru_cache(maxsize=256)
def _digest(signature: Signature) -> bytes:
    return hashlib.sha256(signature.encoded()).digest()


def tensor_words(name: str, dtype: object, shape: Sequence[int | None]) -> str:
    """One entry of ``Signature.tensors``: ``dense/kernel float32 (64, 10)``.

    ``dtype`` is a name, or a dtype of numpy, Keras or TensorFlow; equal dtypes must
    give equal texts on all ranks. An unknown size is None.
    """
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"{name} {dtype} ({sizes})"


def difference(signatures: Sequence[Signature]) -> str:
    """A sentence that says how the ranks' signatures, in rank order, differ."""
    whats = [signature.what for signature in signatures]
    if len(set(whats)) > 1:
        return f"the ranks called different operations: {_by_rank(whats)}"
    counts = [str(len(signature.tensors)) for signature in signatures]
    if len(set(counts)) > 1:
        return (
            f"{whats[0]}: the ranks have different numbers of tensors: "
            f"{_by_rank(counts)}{_only_somewhere(signatures)}"
        )
    rows = zip(*(signature.tensors for signature in signatures), strict=True)
    differing = [_by_rank(row) for row in rows if len(set(row)) > 1]
    shown = "; ".join(differing[:_MAX_DIFFERENCES])
    more = len(differing) - _MAX_DIFFERENCES
    rest = f"; and {more} more" if more > 0 else ""
    return f"{whats[0]}: the ranks have different tensors: {shown}{rest}"


def _by_rank(words: Sequence[str]) -> str:
    """``rank 0, 2: a; rank 1: b``."""
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        ranks.setdefault(word, []).append(rank)
    return "; ".join(
        f"rank {', '.join(map(str, who))}: {word}" for word, who in ranks.items()
    )


def _only_somewhere(signatures: Sequence[Signature]) -> str:
    """List the tensors that only some of the ranks have."""
    common = set.intersection(*(set(signature.tensors) for signature in signatures))
    extra = [
        f"rank {rank} has {tensor}"
        for rank, signature in enumerate(signatures)
        for tensor in signature.tensors
        if tensor not in common
    ]
    return "".join(f"; {words}" for words in extra[:_MAX_DIFFERENCES])

"""known_hosts: which keys a host may present. Pure.

Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT. Authorities (``@cert-authority``) are
ignored, because host certificates are not requested.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tfcluster.schedulers.ssh.config import matches_host


class KeyVerdict(Enum):
    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key that is listed for a host; ``where`` is ``file:line``."""

    type: str
    blob: bytes
    where: str
    revoked: bool = False

    @property
    def file(self) -> str:
        """The file of that line."""
        return self.where.rpartition(":")[0]


def known_keys(files: Iterable[tuple[str, str]], name: str) -> tuple[KnownKey, ...]:
    """The keys listed for ``name``, from file names and texts.

    As in ssh, if no key is listed for ``[host]:port``, the keys for ``host`` count.
    """
    listed = [_listed(file, text) for file, text in files]
    found = tuple(key for each in listed for key in each.keys_of(name))
    if found or not name.startswith("["):
        return found
    plain = name[1:].partition("]")[0]
    return tuple(key for each in listed for key in each.keys_of(plain))


def verdict(
    keys: Iterable[KnownKey], blob: bytes
) -> tuple[KeyVerdict, KnownKey | None]:
    """Whether to trust a host that presents ``blob``, and the decisive key."""
    other: KnownKey | None = None
    trusted: KnownKey | None = None
    for key in keys:
        if key.revoked:
            if key.blob == blob:
                return KeyVerdict.REVOKED, key
        elif key.blob == blob:
            trusted = trusted or key
        else:
            other = other or key
    if trusted is not None:
        return KeyVerdict.TRUSTED, trusted
    return (KeyVerdict.CHANGED, other) if other else (KeyVerdict.UNKNOWN, None)


def fingerprint(blob: bytes) -> str:
    """The fingerprint of a key as ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode()
    return "SHA256:" + digest.rstrip("=")


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file, parsed once for all hosts; its keys are in order.

    ``plain`` has the indices of keys with plain names; ``others`` has the indices of
    keys with patterns or hashed names, which must be tried one by one.
    """

    keys: tuple[KnownKey, ...]
    plain: Mapping[str, list[int]]
    others: tuple[tuple[int, str], ...]

    def keys_of(self, name: str) -> Iterator[KnownKey]:
        matching = {at for at, names in self.others if _is_named(names, name)}
        places = matching.union(self.plain.get(name.lower(), ()))
        return (self.keys[at] for at in sorted(places))


@lru_cache(maxsize=16)
def _listed(file: str, text: str) -> _Listed:
    lines = tuple(_lines(file, text))
    plain: dict[str, list[int]] = {}
    others: list[tuple[int, str]] = []
    for at, (names, _) in enumerate(lines):
        if names.startswith("|1|") or any(sign in names for sign in "*?!"):
            others.append((at, names))
        else:
            for name in names.lower().split(","):
                plain.setdefault(name, []).append(at)
    return _Listed(tuple(key for _, key in lines), plain, tuple(others))


def _lines(file: str, text: str) -> Iterator[tuple[str, KnownKey]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if marker not in (None, "@revoked") or len(words) < 3 or words[0][0] == "#":
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        where = f"{file}:{number}"
        yield words[0], KnownKey(words[1], blob, where, revoked=marker is not None)


def _is_named(names: str, name: str) -> bool:
    if names.startswith("|1|"):
        return _is_hashed(names, name)
    return matches_host(names.split(","), name)


def _is_hashed(names: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in names[3:].split("|"))
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)

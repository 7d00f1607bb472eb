"""known_hosts: which keys a host may present. Pure.

Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT. Authorities (``@cert-authority``) are
ignored, because host certificates are not requested.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from tfcluster.schedulers.ssh.config import matches


@dataclass(frozen=True, slots=True)
class HostKey:
    """A key that a host presents, or that is listed for it in ``file:line``."""

    type: str
    """``ssh-ed25519``."""
    blob: bytes
    where: str = ""
    revoked: bool = False

    @property
    def algorithm(self) -> str:
        """The type, as an argument of ``ssh-keyscan -t``."""
        return self.type.removeprefix("ssh-").split("-")[0]

    def __str__(self) -> str:
        return f"{self.algorithm.upper()} {fingerprint(self.blob)}"


def listed_keys(files: Iterable[tuple[str, str]], name: str) -> tuple[HostKey, ...]:
    """The keys listed for ``name``, from file names and texts.

    As in ssh, if no key is listed for ``[host]:port``, the keys for ``host`` count.
    """
    lines = [line for file, text in files for line in _lines(file, text)]
    keys = tuple(key for names, key in lines if _are_of(names, name))
    if keys or not name.startswith("["):
        return keys
    plain = name[1:].partition("]")[0]
    return tuple(key for names, key in lines if _are_of(names, plain))


def fingerprint(blob: bytes) -> str:
    """The fingerprint of a key as ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode()
    return "SHA256:" + digest.rstrip("=")


@lru_cache(maxsize=16)
def _lines(file: str, text: str) -> tuple[tuple[tuple[str, ...], HostKey], ...]:
    """The names and the key of each line, parsed once for all hosts."""
    return tuple(_parsed(file, text))


def _parsed(file: str, text: str) -> Iterator[tuple[tuple[str, ...], HostKey]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if marker not in (None, "@revoked") or len(words) < 3 or words[0][0] == "#":
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        names = words[0] if words[0].startswith("|1|") else words[0].lower()
        key = HostKey(words[1], blob, f"{file}:{number}", revoked=marker is not None)
        yield tuple(names.split(",")), key


def _are_of(names: tuple[str, ...], name: str) -> bool:
    """Whether the names of a line, perhaps patterns or hashed, mean this host."""
    if names[0].startswith("|1|"):
        return _is_hash_of(names[0], name)
    return matches(names, name.lower())


def _is_hash_of(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hashed[3:].split("|"))
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)

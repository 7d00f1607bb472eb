"""SSH keys: those that a host may present (known_hosts), and the user's own.

Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT, without authorities. Keys that need a
passphrase belong in the ssh agent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm

from tfcluster.schedulers.ssh.config import matches
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.ssh.route import Route


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
    """The keys for ``name``; if ``[host]:port`` has none, those for ``host``."""
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


@dataclass(slots=True)
class Keys:
    """The keys for one route; ``candidates`` fills ``locked`` and ``unusable``."""

    route: Route
    locked: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    def candidates(self) -> Iterator[tuple[str, paramiko.PKey]]:
        """Each key with its name, as ssh orders them: listed, agent's, files."""
        listed = {path: _public(path) for path in self.route.identities}
        held = _held() if self.route.uses_agent else {}
        for path, blob in listed.items():
            if blob is not None and blob in held:
                yield f"{path} (agent)", held[blob]
        wanted = set(listed.values())
        for blob, key in held.items():
            if blob not in wanted and not self.route.identities_only:
                yield f"agent key {fingerprint(blob)}", key
        for path, blob in listed.items():
            if blob is None or blob not in held:
                yield from self._from_file(path)

    def _from_file(self, path: Path) -> Iterator[tuple[str, paramiko.PKey]]:
        try:
            key = paramiko.PKey.from_path(path)
        except FileNotFoundError:
            return
        except TypeError:  # raised for a key that needs a passphrase
            self.locked.append(str(path))
            return
        except (
            OSError,
            ValueError,
            UnsupportedAlgorithm,
            paramiko.SSHException,
            paramiko.pkey.UnknownKeyType,
        ) as error:
            self.unusable.append(f"{path} cannot be used: {error}")
            return
        if key.public_blob is not None:
            yield f"{path} (certificate)", key
            key = paramiko.PKey.from_path(path)
            key.public_blob = None
        for certificate in self.route.certificates:
            if certified := _certified(path, certificate):
                yield f"{path} ({certificate.name})", certified
        yield str(path), key


def _certified(path: Path, certificate: Path) -> paramiko.PKey | None:
    key = paramiko.PKey.from_path(path)
    try:
        key.load_certificate(str(certificate))
    except (OSError, ValueError, binascii.Error):
        return None
    return key


def _held() -> dict[bytes, paramiko.PKey]:
    """The keys of the ssh agent, by public key; {} if there is no agent."""
    try:
        agent = paramiko.Agent()
    except (OSError, paramiko.SSHException):
        return {}
    return {key.blob: key for key in agent.get_keys()}


def _public(path: Path) -> bytes | None:
    """The public key in the .pub file, which identifies a key in the agent."""
    try:
        words = Path(f"{path}.pub").read_text().split()
        return base64.b64decode(words[1])
    except (OSError, ValueError, IndexError, binascii.Error):
        return None

"""The keys for authentication, from the ssh agent and from files, in the order of ssh.

No key is decrypted here: keys that need a passphrase belong in the ssh agent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm

from tfcluster.schedulers.ssh.known_hosts import fingerprint
from tfcluster.schedulers.ssh.paramiko_import import paramiko
from tfcluster.schedulers.ssh.route import Route


@dataclass(slots=True)
class Keys:
    """The keys for one route; ``candidates`` fills ``locked`` and ``unusable``."""

    route: Route
    locked: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    def candidates(self) -> Iterator[tuple[str, paramiko.PKey]]:
        """Each key, with its display name.

        In ssh's order: listed keys that the agent holds, the agent's other keys, files.
        """
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
    """The key with that certificate; None if the certificate is for another key."""
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

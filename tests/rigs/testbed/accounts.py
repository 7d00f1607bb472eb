"""The rig's accounts: root and two users, each with a home and a key of the rig.

The machine's accounts do not change; the hosts see modified copies of its files.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.testbed.commands import RigError, check

NAMES = ("root", "alice", "bob")
_IDS = {"root": 0, "alice": 64101, "bob": 64102}


@dataclass(frozen=True, slots=True)
class Account:
    """An account that may log in; its user and group id are equal."""

    name: str
    number: int
    home: Path

    @property
    def passwd_line(self) -> str:
        both = f"{self.number}:{self.number}"
        return f"{self.name}:x:{both}::{self.home}:/bin/bash\n"


def accounts(homes: Path) -> dict[str, Account]:
    return {name: Account(name, _IDS[name], homes / name) for name in NAMES}


def passwd(machine: str, every: dict[str, Account]) -> str:
    """The hosts' /etc/passwd. It keeps the machine's users, which services need."""
    return _without(machine, every) + "".join(a.passwd_line for a in every.values())


def group(machine: str, every: dict[str, Account]) -> str:
    return _without(machine, every) + "".join(
        f"{a.name}:x:{a.number}:\n" for a in every.values()
    )


def shadow(every: dict[str, Account]) -> str:
    """No password matches, but no account is locked: sshd refuses locked accounts."""
    return "".join(f"{name}:*:19000:0:99999:7:::\n" for name in every)


def _without(machine: str, every: dict[str, Account]) -> str:
    lines = machine.splitlines(keepends=True)
    return "".join(line for line in lines if line.split(":")[0] not in every)


def write_files(etc: Path, every: dict[str, Account]) -> None:
    (etc / "passwd").write_text(passwd(Path("/etc/passwd").read_text(), every))
    (etc / "group").write_text(group(Path("/etc/group").read_text(), every))
    (etc / "shadow").write_text(shadow(every))
    (etc / "shadow").chmod(0o600)


def make_homes(every: dict[str, Account], authorized: Path) -> None:
    """Make each home, with a key that opens the same account on every host."""
    authorized.mkdir()
    for account in every.values():
        ssh = account.home / ".ssh"
        ssh.mkdir(parents=True)
        key = ssh / "id_ed25519"
        make_key(key, f"{account.name}@rig")
        shutil.copy(f"{key}.pub", authorized / account.name)
        for path in (account.home, ssh, key, Path(f"{key}.pub")):
            os.chown(path, account.number, account.number)
        for folder in (account.home, ssh):
            folder.chmod(0o700)


def make_key(path: Path, comment: str) -> None:
    """Make an SSH key without a passphrase; the public key gets the suffix ``.pub``."""
    kind = ("-q", "-t", "ed25519", "-N", "", "-C", comment)
    check(("ssh-keygen", *kind, "-f", str(path)))
    if not path.exists():
        raise RigError(f"ssh-keygen made no {path}")

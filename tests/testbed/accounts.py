"""Who may log in: root and two people, with a home and a key of the rig's own.

The machine's accounts stay as they are; the hosts see copies of its files.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.commands import RigError, check

NAMES = ("root", "alice", "bob")
_IDS = {"root": 0, "alice": 64101, "bob": 64102}


@dataclass(frozen=True, slots=True)
class Account:
    """One who may log in; user and group id are the same number."""

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
    """/etc/passwd of the hosts, from the machine's: services need their users."""
    return _without(machine, every) + "".join(a.passwd_line for a in every.values())


def group(machine: str, every: dict[str, Account]) -> str:
    return _without(machine, every) + "".join(
        f"{a.name}:x:{a.number}:\n" for a in every.values()
    )


def shadow(every: dict[str, Account]) -> str:
    """No password fits, but none is locked: sshd lets no locked account in."""
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
    """Make each home, with a key in it that opens the same account everywhere."""
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
    """Make an SSH key without a passphrase, and its public part beside it."""
    kind = ("-q", "-t", "ed25519", "-N", "", "-C", comment)
    check(("ssh-keygen", *kind, "-f", str(path)))
    if not path.exists():
        raise RigError(f"ssh-keygen made no {path}")

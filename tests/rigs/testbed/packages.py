"""Finds and installs the Debian packages that a rig needs.

Tests only look for them; ``python -m tests.rigs.testbed install`` installs them.
Services of the installed packages are not started on the machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.testbed.commands import RigError, Unavailable, run
from tests.rigs.testbed.daemons import PATH

NEEDS = {
    "ssh": {
        "ip": "iproute2",
        "nsenter": "util-linux",
        "ssh": "openssh-client",
        "/usr/sbin/sshd": "openssh-server",
    },
    "slurm": {
        "munged": "munge",
        "slurmctld": "slurm-wlm",
        "slurmd": "slurm-wlm",
        "srun": "slurm-wlm",
    },
    "sge": {
        "sge_qmaster": "gridengine-master",
        "sge_execd": "gridengine-exec",
        "qsub": "gridengine-client",
        "/etc/services": "netbase",
    },
    "nft": {"nft": "nftables"},
    "clock": {"faketime": "faketime"},
    "browser": {"chromium": "chromium"},
    "shells": {"zsh": "zsh", "fish": "fish"},
    "modules": {"/usr/share/modules/init/bash": "environment-modules"},
}
"""For each group: packages, and a program or path that shows they are installed."""

_LISTS = Path("/var/lib/apt/lists")
_POLICY = Path("/usr/sbin/policy-rc.d")
_NO_SERVICES = (
    "#!/bin/sh\n# No service starts because a test rig was installed.\nexit 101\n"
)
_UPDATE_S = 180.0
_INSTALL_S = 420.0


def missing(groups: Iterable[str]) -> list[str]:
    """The missing packages of these groups, without duplicates."""
    lacking = (
        package
        for group in groups
        for sign, package in NEEDS[group].items()
        if not shutil.which(sign, path=PATH) and not Path(sign).is_file()
    )
    return list(dict.fromkeys(lacking))


def check_root() -> None:
    """Raises Unavailable if the user is not root."""
    if os.geteuid() != 0:
        raise Unavailable("a rig of namespaces needs root")


def require(groups: Iterable[str]) -> None:
    """Raises Unavailable, with one line, if packages of these groups are missing."""
    if lacking := missing(groups):
        raise Unavailable(
            f"not installed: {' '.join(lacking)} "
            "(as root: python -m tests.rigs.testbed install)"
        )


def install(groups: Iterable[str], lock: Path) -> None:
    """Install missing packages; a lock admits one process at a time.

    Raises Unavailable, with one line, if that is not possible.
    """
    wanted = tuple(groups)
    if not missing(wanted):
        return
    check_root()
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if lacking := missing(wanted):
            _install(lacking)
        if left := missing(wanted):
            raise Unavailable(f"apt-get could not install {' '.join(left)}")


def _install(names: list[str]) -> None:
    if shutil.which("apt-get", path=PATH) is None:
        raise Unavailable(f"no apt-get to install {' '.join(names)}")
    with _no_services():
        # Old package lists name files that are gone: update the lists and try again.
        if not any(_LISTS.glob("*_Packages*")) or not _installed(names):
            _apt("update", timeout_s=_UPDATE_S)
            _installed(names)


def _installed(names: list[str]) -> bool:
    options = ("--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120")
    keep = ("-o", "Dpkg::Options::=--force-confold")
    return _apt("install", *options, *keep, *names, timeout_s=_INSTALL_S)


def _apt(*words: str, timeout_s: float) -> bool:
    argv = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", *words)
    try:
        return run(argv, timeout_s=timeout_s).returncode == 0
    except RigError:
        return False


@contextmanager
def _no_services() -> Iterator[None]:
    """Forbid Debian to start services, unless the machine has its own policy file."""
    ours = not _POLICY.exists() or _POLICY.read_text() == _NO_SERVICES
    if ours:
        _POLICY.write_text(_NO_SERVICES)
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink(missing_ok=True)

"""Makes the environment of a requirements file, once for each content and interpreter.

A process with two descriptors as arguments: it reads a ``Make`` from the first, and
writes ``MakerOutput`` and finally ``Made`` or ``Unmade`` to the second.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tfcluster.agent.environments import (
    MARKER,
    folder,
    is_complete,
    open_lock,
    try_lock,
)
from tfcluster.protocol import local
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import WORKDIR, parse

_KEY_CHARS = 20
_PIP = (22, 3)
"""The first version of pip that has the option --python."""
_USUAL = ("~/.local/bin", "~/.cargo/bin")
"""Where uv's installers put uv; these folders are often not on the PATH of an sshd."""
# What an environment depends on, apart from the requirements. An environment refers to
# its base by path, which differs between a host and a container, or two containers.
_FACTS = """\
import json, os, platform, site, sys
try:
    from pip import __version__ as pip
except ImportError:
    pip = None
print(json.dumps({
    "version": sys.version, "machine": platform.machine(),
    "libc": platform.libc_ver(), "path": os.path.realpath(sys.executable),
    "executable": sys.executable, "pip": pip,
    "inside": sys.prefix != sys.base_prefix, "packages": site.getsitepackages()}))
"""
_PURELIB = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


class MakingFailed(Exception):
    """The environment could not be made; the message says why."""


def main(argv: Sequence[str]) -> int:
    request, answer = map(int, argv)
    size = os.fstat(request).st_size
    maker = _Maker(local.decode_make(parse(os.pread(request, size, 0))), answer)
    try:
        maker.make()
    except MakingFailed as error:
        maker.answer(local.Unmade(str(error)))
        return 1
    except OSError as error:
        where = error.filename or folder(os.environ)
        cause = (
            f"the environment cannot be made: {where}: {error.strerror} "
            "(XDG_CACHE_HOME may name another folder for it)"
        )
        maker.answer(local.Unmade(cause))
        return 1
    return 0


class _Maker:
    def __init__(self, request: local.Make, answer: int) -> None:
        self._spec = request.environment
        self._python = request.python
        self._cwd = request.cwd
        self._answer = answer
        self._inherited: tuple[int, ...] = ()

    def answer(self, answer: local.OfMaker) -> None:
        os.write(self._answer, encode(answer))

    def _say(self, text: str) -> None:
        self.answer(local.MakerOutput(text))
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def make(self) -> None:
        shown = self._run(
            " ".join(self._python),
            [*self._python, "-I", "-c", f"exec({_FACTS!r})"],
            stdout=subprocess.PIPE,
        )
        facts: dict[str, Any] = json.loads(shown)
        where = folder(os.environ)
        os.makedirs(where, mode=0o700, exist_ok=True)
        home = os.path.join(where, self._key(facts))
        lock = open_lock(home)
        try:
            self._lock(lock, fcntl.LOCK_SH, home)
            if not is_complete(home):
                fcntl.flock(lock, fcntl.LOCK_UN)
                self._lock(lock, fcntl.LOCK_EX, home)
                # Programs inherit the lock: they may still write if this process is
                # killed.
                self._inherited = (lock,)
                if not is_complete(home):  # otherwise another launch was faster
                    self._make_locked(home, facts)
                # Others may use the environment now, even if pip has left a process.
                fcntl.flock(lock, fcntl.LOCK_SH)
            # `tfcluster clean` counts the environment's age from its last use.
            os.utime(os.path.join(home, MARKER))
        finally:
            os.close(lock)
        self.answer(local.Made(os.path.join(home, "bin", "python"), home))

    def _key(self, facts: dict[str, Any]) -> str:
        base = [facts[key] for key in ("version", "machine", "libc", "path")]
        spec = self._spec
        parts = [spec.digest, base, self._python[:-1], spec.system_site_packages]
        if any(WORKDIR in text for _, text in spec.files):
            parts.append(self._cwd)  # an editable package stays there
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return digest[:_KEY_CHARS]

    def _lock(self, lock: int, kind: int, home: str) -> None:
        if not try_lock(lock, kind):
            self._say(f"waiting for another launch, which is making {home}")
            fcntl.flock(lock, kind)

    def _make_locked(self, home: str, facts: dict[str, Any]) -> None:
        # A maker that was killed may have left anything.
        shutil.rmtree(home, ignore_errors=True)
        began = time.monotonic()
        try:
            self._build(home, facts)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        with open(os.path.join(home, MARKER), "x"):
            pass
        self._say(f"made {home} in {time.monotonic() - began:.0f} s")

    def _build(self, home: str, facts: dict[str, Any]) -> None:
        # uv sees neither a container's files nor the packages of the base.
        system = self._spec.system_site_packages
        uv = _find_uv() if len(self._python) == 1 and not system else None
        python = os.path.join(home, "bin", "python")
        tool = uv or "venv and pip"
        self._say(f"making the environment of {self._spec.file} with {tool}")
        if uv:
            options = ["--quiet", "--no-project", "--python", facts["executable"]]
            self._run("uv venv", [uv, "venv", *options, home])
            install = [uv, "pip", "install", "--python", python]
        else:
            # Installing pip into each environment takes seconds, and Debian's Python
            # needs an extra package for that.
            numbers = re.match(r"(\d+)\.(\d+)", facts["pip"] or "")
            lent = numbers and tuple(map(int, numbers.groups())) >= _PIP
            options = ["--without-pip"] if lent else []
            options += ["--system-site-packages"] if system else []
            self._run("venv", [*self._python, "-m", "venv", *options, home])
            inside = [*self._python[:-1], python]
            if system and facts["inside"]:
                self._add_packages(inside, facts["packages"])
            pip = [*inside, "-m", "pip"]
            if lent:
                pip = [*self._python, "-I", "-m", "pip", "--python", python]
            install = [*pip, "--no-input", "--disable-pip-version-check", "install"]
        files = self._write_files(home)
        self._run("uv pip install" if uv else "pip install", [*install, "-r", files])
        self._run("the environment's Python", [*self._python[:-1], python, "-c", ""])

    def _add_packages(self, python: Sequence[str], packages: Sequence[str]) -> None:
        """Add the base's packages: venv would take those of the base's own base."""
        argv = [*python, "-c", _PURELIB]
        shown = self._run("the environment's Python", argv, stdout=subprocess.PIPE)
        lines = [f"import site; site.addsitedir({path!r})\n" for path in packages]
        with open(os.path.join(shown, "tfcluster-base.pth"), "w") as stream:
            stream.writelines(lines)

    def _write_files(self, home: str) -> str:
        """Write the requirements files; returns the path of the main one."""
        where = os.path.join(home, "requirements")
        os.mkdir(where, mode=0o700)  # index URLs may contain passwords
        for name, text in self._spec.files:
            with open(os.path.join(where, name), "w") as stream:
                stream.write(text.replace(WORKDIR, self._cwd))
        return os.path.join(where, self._spec.files[0][0])

    def _run(self, name: str, argv: Sequence[str], stdout: int | None = None) -> str:
        """Run to the end; returns what a pipe ``stdout`` got. Raises MakingFailed."""
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                pass_fds=self._inherited,
                check=False,
            )
        except OSError as error:
            cause = f"{argv[0]} cannot be started: {error.strerror}"
            raise MakingFailed(cause) from error
        if status := done.returncode:
            end = f"failed with exit status {status}"
            if status < 0:
                end = f"was killed by {signal.Signals(-status).name}"
            raise MakingFailed(f"{self._spec.file}: {name} {end}")
        return (done.stdout or b"").decode(errors="surrogateescape").strip()


def _find_uv() -> str | None:
    usual = os.pathsep.join(map(os.path.expanduser, _USUAL))
    return shutil.which("uv") or shutil.which("uv", path=usual)

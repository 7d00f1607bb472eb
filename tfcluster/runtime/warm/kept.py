"""A kept interpreter: it has imported TensorFlow, and provides forks to launches.

It never trains, and ends by itself some time after its last use. ``docs/protocols.md``
("Kept interpreters") lists the messages. It serves one client at a time, and only
processes of its own user.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tfcluster.isolated_import import PACKAGE_ROOT
from tfcluster.process_title import set_title
from tfcluster.runtime.task import bootstrap
from tfcluster.runtime.warm import imported_files
from tfcluster.runtime.warm.descent import (
    MARKS,
    DescentRequest,
    descend,
    require_room,
    start_time,
)
from tfcluster.runtime.warm.preloader import (
    import_libraries,
    import_runtime,
    require_keras_backend,
    require_known_versions,
    serve,
)
from tfcluster.versions import imported
from tfcluster.wire import Decoder, Frame, WireError, encode

_CLIENT_S = 5.0
"""How long a client may take to send its request and to read the answer."""
_LOOK_S = 5.0
"""How often it checks that launches still find it, and that its login and job exist."""
_FDS = 4
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_CAUSE = 1000


def main(argv: Sequence[str]) -> int | None:
    """Serve until the end. ``argv`` has the descriptors of a socket to the agent that
    started this process, and of the listening socket.

    Also returns in every task that was forked, when its program has ended.
    """
    agent, listener = (socket.socket(fileno=int(word)) for word in argv)
    agent.set_inheritable(False)
    listener.set_inheritable(False)
    os.environ.pop(MARKS, None)
    set_title("tfcluster: kept", "tfcluster-kept")
    kept = _imported(agent)
    if kept is None:
        return None
    server = kept.serve(listener)
    return None if server is None else _serve_run(server, kept)


@dataclass(slots=True)
class Kept:
    """The state of the kept interpreter."""

    terms: Mapping[str, Any]
    """The agent's data about it: command, time to keep, purpose."""
    folders: Sequence[str]
    """``sys.path`` before the imports."""
    fresh_env: Mapping[str, str]
    """The environment with which this interpreter was started."""
    wrapped: Mapping[str, str | None]
    """Changes to the environment by a wrapper of Python, or by Python itself."""
    changes: Mapping[str, str | None]
    """Changes to the environment by the imports."""
    files: imported_files.Snapshot
    keep_s: float
    began: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    uses: int = 0
    login: str | None = None
    """The systemd file that says whether the user is logged in, if this interpreter
    ends at logout."""
    ended: bool = False
    """Whether it was asked to end, or its packages have changed."""

    # --- the loop -------------------------------------------------------------------

    def serve(self, listener: socket.socket) -> socket.socket | None:
        """Answer requests. Returns None at the end, and a run's socket in a server."""
        _be_undisturbed()
        stop, stop_in = os.pipe()
        os.set_blocking(stop_in, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(stop_in, warn_on_full_buffer=False)
        listener.setblocking(False)
        server = None
        try:
            while not self.over() and server is None:
                wait_s = min(max(0.0, self.ends_in_s()), _LOOK_S)
                ready, _, _ = select.select([listener.fileno(), stop], [], [], wait_s)
                if stop in ready:
                    return None
                if listener.fileno() in ready:
                    server = self._accept(listener)
        finally:
            if server is None:
                self.clear_away()
        # In a server, these descriptors are closed, and their numbers are free.
        signal.set_wakeup_fd(-1)
        listener.detach()
        return server

    def ends_in_s(self) -> float:
        return self.used + self.keep_s - time.monotonic()

    def over(self) -> bool:
        """Whether it has to end: its time is up, it has changed, its login or its job
        is over, or it cannot be found."""
        if self.ended or self.ends_in_s() <= 0 or not self._can_be_found():
            return True
        if self.login is not None and logged_out(self.login):
            return True
        return self.terms["job"] is not None and _is_gone(*self.terms["job"])

    def _can_be_found(self) -> bool:
        try:
            found = os.lstat(self.terms["path"])
        except OSError:
            return False
        return found.st_ino == self.terms["inode"]

    def clear_away(self) -> None:
        """Remove the socket and the log, unless they now belong to another process."""
        if self._can_be_found():
            for path in (self.terms["path"], self.terms["log"]):
                with suppress(OSError):
                    os.unlink(path)  # noqa: PTH108 - no path object

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            client, _ = listener.accept()
        except OSError:
            return None
        fds: deque[int] = deque()
        try:
            client.settimeout(_CLIENT_S)
            frame = _request(client, fds)
            if frame is None:
                return None
            answer, server = self._answer(frame, fds)
            if server is not None:
                fds.clear()
                client.detach()
                return server
            client.sendall(encode(answer))
        except (OSError, WireError, ValueError):
            pass  # it has gone, or is not ours
        finally:
            for fd in fds:
                os.close(fd)
            if client.fileno() >= 0:
                client.close()
        return None

    def _answer(
        self, frame: Frame, fds: Sequence[int]
    ) -> tuple[Frame, socket.socket | None]:
        kind = frame["type"]
        if kind == "about":
            return self.about(), None
        if kind == "renew":
            self.keep_s = float(frame.get("keep_s") or self.keep_s)
            self._use()
            return self.about(), None
        if kind == "end":
            self.ended = True
            return {"type": "ending", "pid": os.getpid()}, None
        if kind == "take":
            return self._take(frame, fds)
        return {"type": "refused", "cause": f"unknown request {kind!r}"}, None

    def _take(
        self, frame: Frame, fds: Sequence[int]
    ) -> tuple[Frame, socket.socket | None]:
        changed = imported_files.changed(self.files, self._files_now())
        if changed is not None:
            self.ended = True
            cause = f"{changed} has changed since it was started; it ends now"
            if changed.startswith("the packages"):
                cause = cause.replace(" has changed", " have changed")
            return {"type": "refused", "cause": cause}, None
        try:
            server = descend(DescentRequest.parse(frame, list(fds)))
        except (OSError, ValueError) as error:
            return {"type": "refused", "cause": str(error)[:_MAX_CAUSE]}, None
        if server is None:  # otherwise this is the server
            self._use()
            self.uses += 1
        return {"type": "taken", "pid": os.getpid()}, server

    def _use(self) -> None:
        """Restart its time to live."""
        self.used = time.monotonic()
        with suppress(OSError):
            os.utime(self.terms["path"])

    def _files_now(self) -> imported_files.Snapshot:
        package = f"{PACKAGE_ROOT}/tfcluster"
        return imported_files.snapshot(self.folders, package, self.fresh_env)

    def about(self) -> Frame:
        libraries = {name: imported(name) for name in bootstrap.LIBRARIES}
        return {
            "type": "about",
            "pid": os.getpid(),
            "argv": self.terms["argv"],
            "program": self.terms["program"],
            "python": self.terms["program"]["path"],
            "purpose": self.terms["purpose"],
            "env": self.terms["env"],
            "libraries": libraries,
            "age_s": round(time.time() - self.began, 1),
            "ends_in_s": round(max(0.0, self.ends_in_s()), 1),
            "uses": self.uses,
            "memory_bytes": _memory_bytes(),
        }


def _is_gone(pid: int, started: int) -> bool:
    try:
        return start_time(pid) != started
    except OSError:
        return True


def logged_out(path: str) -> bool:
    """Whether the user has no login left, by systemd's file (sd_uid_get_state(3)).

    Remaining processes, such as this one, keep a login in the state ``closing``.
    """
    try:
        with open(path) as file:  # noqa: PTH123 - as elsewhere
            lines = file.read().splitlines()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return any(line in ("STATE=closing", "STATE=offline") for line in lines)


def _imported(agent: socket.socket) -> Kept | None:
    """Import, and agree with the agent to be kept; None if it no longer agrees."""
    frames = Decoder()
    terms = _next(agent, frames)
    if terms is None:
        return None
    fresh_env = dict(os.environ)
    folders = list(sys.path)
    relative = next((f for f in folders if not f.startswith("/")), None)
    if relative is not None:
        _refuse(agent, f"sys.path has the relative folder {relative!r}")
    try:
        require_room()
    except OSError as error:
        _refuse(agent, f"the marks of runs cannot be written here: {error}")
    package = f"{PACKAGE_ROOT}/tfcluster"
    before = imported_files.snapshot(folders, package, fresh_env)
    strategy = {"TFCLUSTER_STRATEGY": str(terms.get("strategy"))}
    require_keras_backend({**fresh_env, **strategy})
    try:
        seconds = import_libraries()
    except Exception as error:  # a package may raise anything when imported
        cause = f"{type(error).__name__}: {error}"
        _refuse(agent, f"TensorFlow and Keras cannot be imported: {cause}"[:_MAX_CAUSE])
    require_known_versions(agent, strategy)
    import_runtime(strategy)
    files = imported_files.snapshot(folders, package, fresh_env)
    # Keras creates this file if there is none.
    made = {imported_files.settings_file(fresh_env)}
    known = {place: d for place, d in before.items() if place not in made}
    if changed := imported_files.changed(known, files):
        _refuse(agent, f"{changed} changed during the import")
    kept = Kept(
        terms=terms,
        folders=folders,
        fresh_env=fresh_env,
        wrapped=_changes(terms["env"], fresh_env),
        changes=_changes(fresh_env, os.environ),
        files=files,
        keep_s=float(terms["keep_s"]),
        login=_login(terms),
    )
    _say(agent, {**kept.about(), "type": "ready", "seconds": seconds})
    answer = _next(agent, frames)
    agent.close()
    if answer is None or answer["type"] != "keep":
        # The agent is gone, and nobody knows about this process.
        kept.clear_away()
        return None
    return kept


def _login(terms: Mapping[str, Any]) -> str | None:
    """The file of the user's login; None if the user cannot log out.

    A user who was not logged in from the start, as in a cron job, cannot log out.
    """
    login = terms.get("login")
    return None if login is None or logged_out(login) else str(login)


def _refuse(agent: socket.socket, cause: str) -> NoReturn:
    """Tell why this interpreter cannot be kept, and exit."""
    _say(agent, {"type": "unfit", "cause": cause})
    sys.exit(f"tfcluster: {cause}")


def _changes(
    before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str | None]:
    names = before.keys() | after.keys()
    return {n: after.get(n) for n in names if after.get(n) != before.get(n)}


def _changed(
    environ: Mapping[str, str], changes: Mapping[str, str | None]
) -> dict[str, str]:
    merged = {**environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _serve_run(server: socket.socket, kept: Kept) -> int | None:
    """In a server: wait until the run needs it, and then fork the run's tasks."""
    frames, fds = Decoder(), deque[int]()
    frame = _request(server, fds, frames)
    if frame is None or len(fds) != 1:
        return None
    output = fds.popleft()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    env = _changed(frame["env"], kept.wrapped)
    os.environ.clear()
    os.environ.update(_changed(env, kept.changes))
    set_title("tfcluster: warm", "tfcluster-warm")
    require_keras_backend(os.environ)
    require_known_versions(server, os.environ)
    gc.freeze()
    _say(server, {"type": "ready", "seconds": 0.0})
    argv = serve(server, env)
    return None if argv is None else bootstrap.main(argv)


def _be_undisturbed() -> None:
    """Detach from the terminal, and keep no zombies and no folder."""
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guards of runs


def _request(
    client: socket.socket, fds: deque[int], frames: Decoder | None = None
) -> Frame | None:
    """The next frame, and its descriptors; None at the end, or from a foreign user."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if _PEER.unpack(peer)[1] != os.geteuid():
        return None
    frames = frames or Decoder()
    while True:
        data, received, _, _ = socket.recv_fds(client, 65536, _FDS)
        fds.extend(received)
        if not data:
            return None
        # Read all frames: a decoder that is left half-way repeats itself.
        if found := list(frames.feed(data)):
            return found[0]


def _next(end: socket.socket, frames: Decoder) -> Frame | None:
    """The next frame of the agent; None if it has gone."""
    with suppress(OSError):
        while data := end.recv(65536):
            if found := list(frames.feed(data)):
                return found[0]
    return None


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - as elsewhere
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _say(agent: socket.socket, message: Frame) -> None:
    agent.sendall(encode(message))

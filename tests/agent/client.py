"""The launcher's end of the channel, for tests of the real agent, with deadlines."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tfcluster.agent import proc
from tfcluster.base.isolated_import import module_argv
from tfcluster.protocol.wire import PROTOCOL, Decoder, Frame, encode

DEADLINE_S = 30.0
_DEFAULTS: Mapping[str, Frame] = {
    "close": {"others_s": 0.0},
    "prepare": {"environment": None},
    "warm": {"prepend": {}, "wrapped": False},
}
# The Python of hosts may differ from the launcher's.
PYTHON = os.environ.get("TFCLUSTER_TEST_HOST_PYTHON", sys.executable)


class Agent:
    """A started agent; ``frames`` has the frames received that no wait has returned."""

    def __init__(
        self,
        folder: Path,
        *,
        lease_s: float = 30.0,
        grace_s: float = 5.0,
        heartbeat_s: float = 1.0,
        prefix: Sequence[str] = (),
        run: str | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run = run or f"run-{os.urandom(6).hex()}"
        self.keep_pings = False
        self.frames: list[Frame] = []
        self._decoder = Decoder()
        self.ended = False
        argv = module_argv((PYTHON,), "tfcluster.agent", options=("-I", "-S"))
        self.process = subprocess.Popen(
            [*prefix, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.open: Frame = {
            "type": "open",
            "protocol": PROTOCOL,
            "version": "0",
            "nonce": "n-1",
            "run": self.run,
            "lease_s": lease_s,
            "heartbeat_s": heartbeat_s,
            "grace_s": grace_s,
            "witness": None,
        }

    def __enter__(self) -> Agent:
        self.send(**self.open)
        self.hello = self.wait("hello")
        self.pid = int(self.hello["pid"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dispose()

    def dispose(self) -> None:
        """Hang up, wait, and close everything."""
        self.hang_up()
        try:
            self.process.wait(DEADLINE_S + 5)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()

    def send(self, **frame: object) -> None:
        """Send a frame, with defaults for some keys that are not given."""
        self.send_bytes(encode({**_DEFAULTS.get(str(frame["type"]), {}), **frame}))

    def send_bytes(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def hang_up(self) -> None:
        """Close the agent's stdin."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()

    def start(self, task: str, *argv: str, **keys: object) -> None:
        """Send a `start` frame, with defaults for the keys not given."""
        frame = {
            "type": "start",
            "task": task,
            "attempt": 0,
            "argv": list(argv),
            "env": {},
            "cwd": str(self.folder),
            "log": str(self.log(task)),
            "port": None,
            "warm": None,
            "parameter_port": None,
            "listens": False,
            "watched": False,
            "peers": None,
            "prepend": {},
        }
        self.send(**{**frame, **keys})

    def python(self, task: str, code: str, **keys: object) -> None:
        """Start a task that runs Python code."""
        self.start(task, PYTHON, "-u", "-c", code, **keys)

    def log(self, task: str) -> Path:
        return self.folder / "logs" / f"{task.replace(':', '-')}.log"

    def output(self, task: str) -> str:
        """What the task has printed so far; its first output makes the log file."""
        log = self.log(task)
        return log.read_text() if log.exists() else ""

    def stop(self, *tasks: str, grace_s: float = 5.0, signal: str = "TERM") -> None:
        self.send(type="stop", tasks=list(tasks), grace_s=grace_s, signal=signal)

    def close(self, grace_s: float = 5.0, timeout_s: float = DEADLINE_S) -> int:
        """Close the agent in an orderly way and return its exit code."""
        self.send(type="close", grace_s=grace_s)
        self.wait("bye", timeout_s=timeout_s)
        return self.process.wait(timeout_s)

    def wait(
        self, type_: str, /, timeout_s: float = DEADLINE_S, **keys: object
    ) -> dict[str, Any]:
        """Wait for a frame with this type and keys, and remove it from ``frames``."""
        wanted = {"type": type_, **keys}
        return self.wait_for(
            lambda f: wanted.items() <= f.items(), timeout_s=timeout_s, what=str(wanted)
        )

    def wait_for(
        self,
        matches: Callable[[Frame], bool],
        *,
        timeout_s: float = DEADLINE_S,
        what: str = "a frame",
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            for index, frame in enumerate(self.frames):
                if matches(frame):
                    return self.frames.pop(index)
            left = deadline - time.monotonic()
            if left <= 0 or not self.read(left):
                last = "\n".join(str(f)[:300] for f in self.frames[-20:])
                raise AssertionError(f"{what} did not come; had:\n{last}")

    def read(self, timeout_s: float) -> bool:
        """Read what the agent sends; False at end of file or when nothing came."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return False
        data = os.read(fd, 1 << 20)
        self.ended = not data
        frames = self._decoder.feed(data)
        self.frames += [f for f in frames if f["type"] != "ping" or self.keep_pings]
        return bool(data)

    def read_all(self, timeout_s: float = DEADLINE_S) -> list[Frame]:
        """Read until the end of the channel; returns all frames not yet waited for."""
        deadline = time.monotonic() + timeout_s
        while not self.ended:
            left = deadline - time.monotonic()
            assert left > 0, "the channel did not end"
            self.read(left)
        return self.frames

    def stderr(self) -> str:
        """Return the agent's stderr; blocks until the agent has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


def marked(run: str) -> list[proc.ProcessEntry]:
    """Return the living processes that carry the marker of a run."""
    table = proc.snapshot().values()
    return [
        process
        for process in table
        if not process.dead and proc.environ(process.pid).get("TFCLUSTER_RUN") == run
    ]


def gone(pid: int) -> bool:
    process = proc.read(pid)
    return process is None or process.dead

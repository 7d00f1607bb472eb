"""A stand-in for a warm interpreter that imports nothing: `standin.py MODE FD`.

Speaks the same protocol as the real one, but forks with plain os.fork: twice, so that
the agent becomes the parent of the task. A task runs its first argument as code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from typing import Any


def say(agent: socket.socket, message: dict[str, Any]) -> None:
    agent.sendall(json.dumps(message).encode() + b"\n")


def become_task(request: dict[str, Any], output: int, events: int) -> None:
    """Run the task in the forked child; never returns."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request["cwd"])
    for name, value in request["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ["TFCLUSTER_EVENTS"] = str(events)
    code = 0
    try:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the task's own
        exec(request["argv"][0], {"argv": request["argv"]})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_task(request: dict[str, Any], fds: list[int]) -> int:
    """Fork a task whose parent will be the agent; returns its pid."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.close(write_end)
            become_task(request, *fds)
        os.write(write_end, struct.pack("i", pid))
        os._exit(0)
    os.close(write_end)
    os.waitpid(between, 0)
    pid = int(struct.unpack("i", os.read(read_end, 4))[0])
    os.close(read_end)
    return pid


def serve(agent: socket.socket, mode: str) -> None:
    pending, data = [], b""
    while True:
        part, fds, _, _ = socket.recv_fds(agent, 65536, 8)
        if not part:
            return
        pending += fds
        data += part
        while b"\n" in data:
            line, _, data = data.partition(b"\n")
            request = json.loads(line)
            mine, pending = pending[:2], pending[2:]
            if mode == "refuse":
                answer: dict[str, Any] = {"type": "fork_failed", "cause": "no more"}
            elif mode == "die at fork":
                fork_task(request, mine)
                os.kill(os.getpid(), signal.SIGKILL)
            elif mode == "babble":
                answer = {"type": "forked", "pid": "many"}
            else:
                answer = {"type": "forked", "pid": fork_task(request, mine)}
                if mode == "slow answer":
                    time.sleep(0.3)
            for fd in mine:
                os.close(fd)
            say(agent, {**answer, "id": request["id"]})


def main() -> None:
    mode, number = sys.argv[1:]
    agent = socket.socket(fileno=int(number))
    agent.set_inheritable(False)
    if mode == "import error":
        raise ImportError("no module named nothing")
    if mode == "import for ever":
        time.sleep(600)
    say(agent, {"type": "ready"})
    serve(agent, mode)


main()

"""Runs scripts as ranks, in forks of a process that has imported TensorFlow.

    fork_ranks.py FD

FD is a listening socket. A separate process serves each connection, and first sends a
line with its process ID, which is also its process group ID. Each received line is a
job in JSON: [FOLDER, TIMEOUT_S, [NAME, SIZE, SCRIPT, [ARG...], {VARIABLE: VALUE},
SERVERS]]. A job also has SERVERS parameter servers. Output and exit status of rank R
are written to FOLDER/NAME/R.out and R.exit; the ranks run in FOLDER/NAME/work. The
answer is one line, sent after all ranks have ended: "ended", or "timed out" if ranks
were still there after TIMEOUT_S seconds. Those ranks have been ended then, and the
stacks of their threads are in their output. The program ends with the last connection.

With TFCLUSTER_TEST_GPU=1, each rank has a host name of its own, so that NCCL accepts
several ranks on one GPU, and Keras does not choose XLA, which ranks cannot use.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import pkgutil
import runpy
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

FIRST_S = 30.0
"""How long to wait for the first connection: longer than connecting takes."""

GPU = os.environ.get("TFCLUSTER_TEST_GPU") == "1"

Job = tuple[str, int, str, list[str], dict[str, str], int]


def main(listening: socket.socket) -> None:
    import_module("keras")
    _import_all_of("tfcluster.runtime")  # Most ranks need most of it.
    if GPU:
        trainer = sys.modules["keras.src.trainers.trainer"]
        trainer.model_supports_jit = lambda model: False  # type: ignore[attr-defined]  # of a module
    gc.collect()
    gc.freeze()  # Else collections in the ranks would copy the libraries' pages.
    served: dict[int, int] = {}
    while True:
        patience_s = None if served else FIRST_S
        listener = listening.fileno()
        ready, _, _ = select.select([listener, *served], [], [], patience_s)
        for descriptor in (d for d in ready if d in served):
            os.close(descriptor)
            os.waitpid(served.pop(descriptor), 0)
        if listener in ready:
            channel, _ = listening.accept()
            pid = os.fork()
            if pid == 0:
                listening.close()
                for descriptor in served:
                    os.close(descriptor)
                serve(channel)
                os._exit(0)
            channel.close()
            served[os.pidfd_open(pid)] = pid
        elif not served:
            return


def _import_all_of(package: str) -> None:
    folder = import_module(package).__path__
    for module in pkgutil.walk_packages(folder, f"{package}."):
        if not module.name.endswith(("__main__", "sitecustomize")):
            import_module(module.name)


def serve(channel: socket.socket) -> None:
    """Run the jobs of one connection, one after the other."""
    os.setsid()
    channel.sendall(b"%d\n" % os.getpid())
    with channel, channel.makefile("rb") as requests:
        for line in requests:
            parent, timeout_s, job = json.loads(line)
            folder = Path(parent) / job[0]
            (folder / "work").mkdir(parents=True)
            in_time = run_ranks(channel, folder, job, timeout_s)
            channel.sendall(b"ended\n" if in_time else b"timed out\n")


def run_ranks(channel: socket.socket, folder: Path, job: Job, timeout_s: float) -> bool:
    """Run a job. Whether all of its ranks have ended in time, and by themselves."""
    deadline_s = time.monotonic() + timeout_s
    in_time = True
    _, size, script, args, env, servers = job
    token = secrets.token_hex(32)
    with ExitStack() as held:
        addresses = [_hold(held) for _ in range(size)]
        serving = [_hold(held) for _ in range(servers)]
        pids = [_serve(channel, serving, i, size, token) for i in range(servers)]
        held.callback(_end, pids)
        env = {"TFCLUSTER_PARAMETER_SERVERS": ",".join(serving)} | env
        children = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os.close(channel.detach())
                _redirect(folder / f"{rank}.out")
                faulthandler.enable()  # A SIGABRT makes it write the stacks.
                if GPU:
                    _use_own_hostname(f"rank-{rank}")
                os.chdir(folder / "work")
                os.environ.update(_environment(rank, addresses, token) | env)
                os._exit(_run(script, args))
            children[pid] = rank
        watched = {os.pidfd_open(pid): pid for pid in (*children, *pids)}
        while children:
            left_s = max(deadline_s - time.monotonic(), 0.0) if in_time else None
            ready, _, _ = select.select([channel.fileno(), *watched], [], [], left_s)
            if not ready:
                in_time = False
                for pid in children:  # It writes its stacks, and ends.
                    os.kill(pid, signal.SIGABRT)
            if channel.fileno() in ready:
                os.killpg(0, signal.SIGKILL)  # The client has disconnected.
            for descriptor in ready:
                os.close(descriptor)
                pid = watched.pop(descriptor)
                if pid not in children:
                    raise RuntimeError("a parameter server has ended")
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                (folder / f"{children.pop(pid)}.exit").write_text(str(code))
        for descriptor in watched:
            os.close(descriptor)
    return in_time


def _serve(
    channel: socket.socket, addresses: list[str], index: int, size: int, token: str
) -> int:
    """Fork a parameter server; its pid."""
    if pid := os.fork():
        return pid
    os.close(channel.detach())
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    from tfcluster.runtime.parameter_server.server_socket import ServerSocket
    from tfcluster.runtime.parameter_server.service import Service
    from tfcluster.runtime.parameter_server.update_graph import Engine

    service = Service(size, Engine)
    listening = ServerSocket(
        service, addresses, index, size=size, token=bytes.fromhex(token)
    )
    signal.sigwait([signal.SIGTERM])
    listening.close()
    os._exit(0)


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _hold(held: ExitStack) -> str:
    """The address of a port that is bound but not listened on, as an agent does."""
    holder = held.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{holder.getsockname()[1]}"


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _use_own_hostname(name: str) -> None:
    """Enter a UTS namespace; only root may. Raises OSError."""
    new_uts_namespace = 0x04000000
    if ctypes.CDLL(None, use_errno=True).unshare(new_uts_namespace) < 0:
        raise OSError(ctypes.get_errno(), "cannot make a UTS namespace")
    socket.sethostname(name)


def _environment(rank: int, addresses: list[str], token: str) -> dict[str, str]:
    kind, index = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    task = {"type": kind, "index": index}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "TFCLUSTER_TASK": f"{kind}:{index}",
        "TFCLUSTER_RANK": str(rank),
        "TFCLUSTER_SIZE": str(len(addresses)),
        "TFCLUSTER_LOCAL_RANK": str(rank),
        "TFCLUSTER_LOCAL_SIZE": str(len(addresses)),
        "TFCLUSTER_STRATEGY": "collective",
        "TFCLUSTER_TOKEN": token,
    }


def _run(script: str, args: list[str]) -> int:
    from tfcluster.runtime.context import context_from
    from tfcluster.runtime.horovod import module_names
    from tfcluster.runtime.scripts import program_kind
    from tfcluster.runtime.scripts.run_script import Script
    from tfcluster.runtime.task import injection

    context = context_from(os.environ)
    module_names.install(print)
    program_kind.read(Script("", script), context)
    injection.begin(context)
    injection.install(context)
    sys.argv[:] = [script, *args]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

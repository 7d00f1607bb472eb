"""The warm interpreter: imports TensorFlow once, then forks a task on every request.

``docs/protocols.md`` ("Agent and warm interpreter") lists the messages. It does not
initialise TensorFlow's context, devices or threads, which would not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from tfcluster.base.isolated_import import module_argv
from tfcluster.base.process_title import set_title
from tfcluster.base.versions import imported_too_old
from tfcluster.protocol import local
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import Decoder
from tfcluster.runtime.files import private_files
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.scripts.run_script import import_folder, parse
from tfcluster.runtime.task import bootstrap
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.warm.fork import ForkRequest, fork_task
from tfcluster.runtime.warm.hidden_modules import (
    HiddenModules,
    Imports,
    MissingModules,
    content,
    settings_file,
    shadowed_module,
)
from tfcluster.runtime.warm.import_variables import is_read_early, variables_set
from tfcluster.runtime.warm.wrapper import below_wrapper

_FDS_OF_A_FORK = 2
"""The task's output and its events socket."""
_HOOKS = "tfcluster.runtime.keras.strategies.select"
"""A module that imports all of the training runtime, and installs nothing."""
_MOST_WORDS = 1000
_DRAIN_S = 1.0
"""How long the agent may take to read the last events before a new start."""


def main(argv: Sequence[str]) -> int | None:
    """Serve the agent on the socket with descriptor ``argv[0]``, until it disconnects.

    ``argv[1]`` is the agent's pid if this interpreter was started by a wrapper.

    Also returns in every forked task when its program has ended, so that a task exits
    like any Python process.
    """
    if len(argv) > 1:
        agent = below_wrapper(int(argv[0]), int(argv[1]))
    else:
        agent = socket.socket(fileno=int(argv[0]))
    agent.set_inheritable(False)
    set_title("tfcluster: warm", "tfcluster-warm")
    fresh_env = dict(os.environ)
    import_tensorflow(agent)
    task_argv = serve(agent, fresh_env)
    return None if task_argv is None else bootstrap.main(task_argv)


def import_tensorflow(agent: socket.socket) -> None:
    """Import TensorFlow and Keras, and report to the agent when it is done."""
    trains = os.environ.get("TFCLUSTER_STRATEGY") != "none"
    if trains:
        _require_keras_backend()
    _import_libraries()
    if trains:
        _require_known_versions(agent)
        _import_runtime()
    _send(agent, local.Ready())


def _require_keras_backend() -> None:
    """Exit if Keras would use a backend other than TensorFlow, which cannot train."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        sys.exit(
            f"tfcluster: KERAS_BACKEND is {backend!r} in this host's environment: "
            "tfcluster can distribute only Keras's 'tensorflow' backend"
        )


def _import_libraries() -> None:
    """Import the libraries that tasks need, once."""
    global _imports
    file = settings_file()
    earlier = frozenset(sys.modules)
    bootstrap.quieten_tensorflow()
    missed = MissingModules()
    sys.meta_path.append(missed)
    state = random.getstate()
    with _uncollected(), _variables_read() as read:
        for library in bootstrap.LIBRARIES:
            importlib.import_module(library)
    sys.meta_path.remove(missed)
    bootstrap.words_drawn = _words_since(state)
    _imports = Imports(
        earlier, frozenset(read), frozenset(missed.names), content(file), file
    )


_imports: Imports | None = None


def _words_since(state: Any) -> int:
    """How many 32-bit words were drawn from Python's generator; 0 if very many."""
    now, generator = random.getstate(), random.Random()
    generator.setstate(state)
    for count in range(_MOST_WORDS):
        if generator.getstate() == now:
            return count
        generator.getrandbits(32)
    return 0


@contextmanager
def _variables_read() -> Iterator[set[str]]:
    """Record the names of the variables that Python code reads in this context."""
    read: set[str] = set()
    encode_name = os.environ.encodekey

    def recorded(name: str) -> str:  # it may be bytes, and so may the result
        read.add(name)
        return encode_name(name)

    os.environ.encodekey = recorded
    try:
        yield read
    finally:
        os.environ.encodekey = encode_name


def _import_runtime() -> None:
    """Import the hooks of all strategies, which every training task needs.

    Import errors are left to the tasks: they import the module again, and say which
    part of Keras or TensorFlow is missing.
    """
    with _uncollected(), suppress(Exception):
        importlib.import_module(_HOOKS)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Exclude the objects of imports in this context from garbage collection.

    These objects stay alive. Collection during the import only costs time, and later it
    would only touch pages that the tasks share, and so copy them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _require_known_versions(agent: socket.socket) -> None:
    """Exit if TensorFlow or Keras is too old, before any task starts."""
    if problem := imported_too_old():
        _send(agent, local.Unfit(problem))
        sys.exit(f"tfcluster: {problem}")


def serve(agent: socket.socket, fresh_env: Mapping[str, str]) -> list[str] | None:
    """Fork a task on every request; return None when the agent has disconnected.

    In a forked task, returns the arguments for its bootstrap. ``fresh_env`` is the
    environment with which this interpreter was started.
    """
    # The agent forwards a Ctrl-C of the terminal to the tasks only.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for asked, fds in requests(agent):
        try:
            if len(fds) != _FDS_OF_A_FORK:
                raise ValueError(
                    f"a fork request needs {_FDS_OF_A_FORK} descriptors, got {len(fds)}"
                )
            pid = fork_task(ForkRequest(asked.env, asked.cwd, *fds))
        except (OSError, ValueError) as error:
            answer: local.OfInterpreter = local.ForkFailed(asked.id, str(error))
        else:
            if pid is None:
                # Its descriptor is already closed, and the number may be reused.
                agent.detach()
                return warm_arguments(list(asked.argv), asked.env, fresh_env)
            answer = local.Forked(asked.id, pid)
        for fd in fds:
            os.close(fd)
        _send(agent, answer)
    return None


def requests(agent: socket.socket) -> Iterator[tuple[local.Fork, tuple[int, ...]]]:
    """Yield every request to fork and its descriptors, until end of file."""
    frames, fds = Decoder(), deque[int]()
    while True:
        data, received, _, _ = socket.recv_fds(agent, 65536, 4 * _FDS_OF_A_FORK)
        fds.extend(received)
        if not data:
            return
        for frame in frames.feed(data):
            count = min(_FDS_OF_A_FORK, len(fds))
            descriptors = tuple(fds.popleft() for _ in range(count))
            yield local.decode_fork(frame), descriptors


def warm_arguments(
    argv: list[str], changes: Mapping[str, str | None], fresh_env: Mapping[str, str]
) -> list[str]:
    """``argv`` if the task may run in this interpreter; otherwise replaces the process.

    A program must not notice how it was started. If it would notice, the task starts
    again in a fresh interpreter, with execve: slower, but correct. What the imports
    have done is hidden until the program imports TensorFlow; if it first changes what
    the imports depend on, the task starts again then.
    """
    events = os.environ["TFCLUSTER_EVENTS"]
    merged = {**fresh_env, **changes}
    env = {name: value for name, value in merged.items() if value is not None}
    program = parse(argv[1:]) if argv[:1] == ["run"] else None
    folder = import_folder(program) if program else None
    reason = late_variable(changes, fresh_env) or shadowed_module(folder, sys.modules)
    if reason is not None:
        reporter().phase(f"starting cold: {reason}")
        start_cold(argv, env, events)
    if program is None or _imports is None:
        return argv

    def start_again(what: str) -> NoReturn:
        reporter().cold_start(
            f"the program {what} before it imports TensorFlow: it starts in a fresh "
            "interpreter, which takes longer"
        )
        reporter().drain(_DRAIN_S)
        descriptors, variables = private_files.leave()
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        hidden.state.restore([int(events), *descriptors])
        start_cold(argv, {**env, **variables}, events)

    source = program_kind.source_of(program) or ""
    hidden = HiddenModules(_imports, env, start_again)
    module_source = partial(program_kind.source_of_module, program)
    hidden.expect(variables_set(source, env, module_source))
    return argv


def late_variable(
    changes: Mapping[str, str | None], environ: Mapping[str, str]
) -> str | None:
    """Why ``changes`` are too late for this interpreter; None if they are not."""
    for name, value in changes.items():
        if is_read_early(name) and environ.get(name) != value:
            return f"{name} is read only once, at the start"
    return None


def start_cold(argv: Sequence[str], env: Mapping[str, str], events: str) -> NoReturn:
    """Replace this process with a fresh interpreter with the environment ``env``.

    ``events`` is the number of the events socket.
    """
    os.set_inheritable(int(events), True)
    cold_argv = module_argv(
        (sys.executable,), "tfcluster.runtime.task.bootstrap", *argv
    )
    os.execve(sys.executable, cold_argv, {**env, "TFCLUSTER_EVENTS": events})


def _send(agent: socket.socket, message: local.OfInterpreter) -> None:
    agent.sendall(encode(message))

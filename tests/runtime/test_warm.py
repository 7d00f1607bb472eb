"""The warm interpreter: it imports once, and each task starts in a clean state."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.time_limits import allow_s
from tests.runtime.harness import (
    DEADLINE_S,
    Ended,
    WarmInterpreter,
)

pytestmark = pytest.mark.tensorflow


def run(
    warm: WarmInterpreter,
    code: str,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
) -> Ended:
    return warm.start(["run", "-c", code], cwd, env).end()


def printed_by(
    warm: WarmInterpreter,
    code: str,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
) -> Any:
    """Run ``code``, which prints JSON; the decoded output."""
    ended = run(warm, code, cwd, env)
    assert ended.status == 0, ended.output
    return json.loads(ended.output)


def test_a_forked_task_has_only_its_own_descriptors_and_session(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    code = """
import json, os, signal
print(json.dumps({
    'parent': os.getppid(), 'leader': os.getsid(0) == os.getpgid(0) == os.getpid(),
    'cwd': os.getcwd(), 'stdin': os.readlink('/proc/self/fd/0'),
    'fds': sorted(int(n) for n in os.listdir('/proc/self/fd')
        if os.path.exists('/proc/self/fd/' + n)),
    'events': int(os.environ['TFCLUSTER_EVENTS']),
    'closed on exec': not os.get_inheritable(int(os.environ['TFCLUSTER_EVENTS'])),
    'native': os.system('test "$A" = "b c" -a -z "$GONE"'),
    'a': os.environ['A'], 'gone': 'GONE' in os.environ,
}))"""
    found = printed_by(warm, code, tmp_path, {"A": "b c", "GONE": None})
    events = found.pop("events")
    assert found == {
        # Not the warm interpreter but the nearest subreaper, which is this process.
        "parent": os.getpid(),
        "leader": True,
        "cwd": str(tmp_path),
        "stdin": "/dev/null",
        "fds": [0, 1, 2, events],
        "closed on exec": True,
        "native": 0,
        "a": "b c",
        "gone": False,
    }


def test_changes_to_the_environment_reach_tensorflow_and_die_with_the_task(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    code = """
import ctypes, json, os
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(json.dumps([os.environ.get('TF_CONFIG'), (libc.getenv(b'TF_CONFIG') or b'')
    .decode()]))"""
    assert printed_by(warm, code, tmp_path, {"TF_CONFIG": "{}"}) == ["{}", "{}"]
    assert printed_by(warm, code, tmp_path) == [None, ""]


def test_forked_tasks_have_different_random_states(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    code = """
import json, multiprocessing, random
import numpy
print(json.dumps([random.random(), numpy.random.rand(),
    multiprocessing.current_process().authkey.hex()]))"""
    first, second = (printed_by(warm, code, tmp_path) for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_only_keras_does_without_what_is_hidden_from_it(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    """The rule of ``tests/kit/site``."""
    code = """
import importlib.util, json, sys
import keras
extras = ["matplotlib", "sklearn"]
print(json.dumps([[name in sys.modules for name in extras],
    [importlib.util.find_spec(name) is not None for name in extras]]))"""
    assert printed_by(warm, code, tmp_path) == [[False, False], [True, True]]


def test_spawned_processes_find_a_relative_script(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing as mp\n"
        "def f(): print('in a child', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    __file__ = 'train.py'\n"
        "    p = mp.get_context('spawn').Process(target=f); p.start(); p.join()\n"
    )
    ended = warm.start(["run", "train.py"], tmp_path).end()
    assert ended.output == "in a child\n"


def test_tensorflow_works_in_every_fork(warm: WarmInterpreter, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import keras, numpy as np, tensorflow as tf
assert not tf.config.experimental.get_synchronous_execution() is None
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile('sgd', 'mse')
model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
print('trained', len(tf.config.list_logical_devices('CPU')),
      np.linalg.inv(np.eye(300)).sum())
""")
    tasks = [warm.start(["run", "train.py"], tmp_path) for _ in range(2)]
    for task in tasks:
        ended = task.end()
        assert (ended.status, ended.output.splitlines()[-1]) == (0, "trained 1 300.0")


def test_a_task_is_there_at_once(warm: WarmInterpreter, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import tensorflow; print('up')")
    took = []
    for _ in range(3):
        start = time.monotonic()
        task = warm.start(["run", "train.py"], tmp_path)
        task.wait_for_output("up")
        took.append(time.monotonic() - start)
        assert task.end().status == 0
    # About 30 ms; an import takes seconds.
    assert min(took) < allow_s(1)


def test_no_zombie_is_left(warm: WarmInterpreter, tmp_path: Path) -> None:
    assert run(warm, "pass", tmp_path).status == 0
    children = f"/proc/{warm.process.pid}/task/{warm.process.pid}/children"
    assert Path(children).read_text() == ""


def test_nothing_of_tensorflow_is_initialised(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    code = """
import json
from tensorflow.python.eager import context
print(json.dumps(context._context is None))"""
    assert printed_by(warm, code, tmp_path) is True


def test_stacks_are_reported_while_it_hangs(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import time; print('up'); time.sleep(60)")
    task = warm.start(["run", "train.py"], tmp_path)
    task.wait_for_output("up")
    task.ask("stacks")
    text = task.wait_for_event("stack")["text"]
    assert text.startswith(
        "Thread MainThread (most recent call last):\n"
        f'  File "{tmp_path}/train.py", line 1, in <module>\n'
    )
    os.kill(task.pid, signal.SIGTERM)
    assert task.end().status == -signal.SIGTERM


def test_an_interrupt_ends_a_task_by_the_signal(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    # Python does not see a signal that comes just before it begins to sleep.
    code = "import time\nprint(1)\nwhile True: time.sleep(0.01)"
    task = warm.start(["run", "-c", code], tmp_path)
    task.wait_for_output("1")
    os.kill(task.pid, signal.SIGINT)
    ended = task.end()
    assert ended.status == -signal.SIGINT
    assert ended.output.endswith("\nKeyboardInterrupt\n")
    # The interpreter itself ignores an interrupt from the terminal.
    os.kill(warm.process.pid, signal.SIGINT)
    assert run(warm, "print('on')", tmp_path).output == "on\n"


@pytest.mark.parametrize(
    ("request_", "fds", "cause"),
    [
        ({"argv": [], "env": {}, "cwd": "/no/such"}, 2, "No such file or directory"),
        ({"argv": [], "env": {}, "cwd": "/"}, 0, "needs 2 descriptors, got 0"),
    ],
)
def test_what_cannot_be_forked_is_reported(
    warm: WarmInterpreter,
    tmp_path: Path,
    request_: dict[str, Any],
    fds: int,
    cause: str,
) -> None:
    with (tmp_path / "x").open("wb") as file:
        answer = warm.ask(request_, [file.fileno()] * fds)
    assert (answer["type"], answer["id"]) == ("fork_failed", 7)
    assert cause in answer["cause"]
    assert run(warm, "print('on')", tmp_path).output == "on\n"


COLD = """
import json, os, sys
print(json.dumps([os.getpid(), 'tensorflow' in sys.modules,
    sys.flags.hash_randomization, 'TF2_BEHAVIOR' in os.environ,
    os.environ['TFCLUSTER_EVENTS_OWNER']]))
sys.exit('the end')
"""


@pytest.mark.parametrize(
    ("env", "module_name", "reason"),
    [
        ({"PYTHONHASHSEED": "0"}, "x.py", "PYTHONHASHSEED is read only once"),
        ({"KERAS_BACKEND": "jax"}, "x.py", "KERAS_BACKEND is read only once"),
        ({}, "rich.py", "the program's folder contains its own module 'rich'"),
        ({}, "keras/__init__.py", "folder contains its own module 'keras'"),
    ],
)
def test_a_task_that_would_notice_starts_cold(
    warm: WarmInterpreter,
    tmp_path: Path,
    env: dict[str, str],
    module_name: str,
    reason: str,
) -> None:
    (tmp_path / module_name).parent.mkdir(exist_ok=True)
    (tmp_path / module_name).write_text("")
    (tmp_path / "train.py").write_text(COLD)
    task = warm.start(["run", "train.py", "arg"], tmp_path, env)
    ended = task.end()
    assert ended.status == 1
    first, last = ended.output.splitlines()
    pid, imported, randomized, behaviour, owner = json.loads(first)
    assert (pid, imported, behaviour) == (task.pid, False, False)
    assert randomized == ("PYTHONHASHSEED" not in env)
    assert owner == str(task.pid)
    assert last == "the end"
    said = ended.events
    assert said[0]["type"] == "phase"
    assert reason in said[0]["phase"]
    assert said[1:] == [{"type": "failure", "cause": "the end"}]


def test_folders_that_are_no_packages_shadow_nothing(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "rich.txt").write_text("")
    (tmp_path / "train.py").write_text("print('ran')")
    ended = warm.start(["run", "train.py"], tmp_path).end()
    assert (ended.output, ended.said("phase")) == ("ran\n", [])


def test_tasks_outlive_the_interpreter_that_forked_them(tmp_path: Path) -> None:
    fake_tensorflow(tmp_path, "")
    warm = interpreter(tmp_path)
    task = warm.start(["run", "-c", "print(1); input() or 1; print(2)"], tmp_path)
    task.wait_for_output("1")
    assert warm.close() == 0
    ended = task.end()
    # Standard input is empty.
    assert ended.output.endswith("EOFError: EOF when reading a line\n")


def test_a_failed_import_is_shown(tmp_path: Path) -> None:
    fake_tensorflow(tmp_path, "import no_such_library")
    warm = interpreter(tmp_path, ready=False)
    assert warm.process.wait(DEADLINE_S) == 1
    text = (tmp_path / "log").read_text()
    assert text.endswith("ModuleNotFoundError: No module named 'no_such_library'\n")
    warm.close()


def test_a_lack_of_descriptors_is_reported(tmp_path: Path) -> None:
    fake_tensorflow(
        tmp_path,
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))\n",
    )
    warm = interpreter(tmp_path)
    with (tmp_path / "x").open("wb") as file:
        answer = warm.ask(
            {"argv": [], "env": {}, "cwd": "/"}, [file.fileno(), file.fileno()]
        )
    assert answer["type"] == "fork_failed"
    assert "Too many open files" in answer["cause"]
    assert warm.close() == 0


def fake_tensorflow(folder: Path, text: str) -> None:
    (folder / "tensorflow.py").write_text(text)
    (folder / "keras.py").write_text("")


def interpreter(folder: Path, *, ready: bool = True) -> WarmInterpreter:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    warm = WarmInterpreter(env, folder / "log")
    if ready:
        assert warm.hear()["type"] == "ready"
    return warm

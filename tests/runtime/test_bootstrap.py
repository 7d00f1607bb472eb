"""A program sees the same under tfcluster as under Python itself."""

from __future__ import annotations

import functools
import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness import Ended, WarmInterpreter, start_cold

SCRIPTS: dict[str, str | bytes] = {
    "says_hello": "print('hello')",
    "shows_itself": """
import sys
print(sys.argv, sys.orig_argv[1:], sys.path[0], __file__, __name__)
print(sorted(globals()), __spec__, __package__, __builtins__, __doc__)
print(__loader__.name, __loader__.path, sys.modules['__main__'].__dict__ is globals())
print(__annotations__, __cached__)
import os; print(os.getcwd(), sys.stdin.read(), sys.flags)
""",
    "has_a_docstring": "'''Documented.'''\nprint(__doc__)\nx: int = 1\n"
    "print(__annotations__)",
    "exits_with_3": "import sys; sys.exit(3)",
    "exits_with_words": "import sys; sys.exit('no such thing')",
    "exits_with_none": "import sys; sys.exit(None)",
    "exits_with_an_object": "raise SystemExit([1, 2])",
    "fails": "def f():\n    1 / 0\nf()",
    "fails_in_a_chain": """
try:
    {}['a']
except KeyError as error:
    raise RuntimeError('two\\nlines') from error
""",
    "fails_to_import": "import no_such_module_at_all",
    "has_a_syntax_error": "x = 1\ny = = 2\n",
    "is_latin_1": b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n",
    "has_a_bom": b"\xef\xbb\xbfprint('bom')\n",
    "uses_the_future": "from __future__ import annotations\nx: y = 1\n"
    "print(__annotations__)",
    "has_no_future": "def f(x: print('evaluated')): ...",
    "is_interrupted": "raise KeyboardInterrupt",
    "is_killed": "import os; os.kill(os.getpid(), 9)",
    "terminates": "import os; os.kill(os.getpid(), 15)",
    "aborts": "import os; os.abort()",
    "leaves_at_once": "import os; print('x'); os._exit(4)",
    "has_an_excepthook": """
import sys, traceback
def hook(kind, value, tb):
    print('hooked', kind.__name__, value)
    traceback.print_exception(kind, value, tb)
sys.excepthook = hook
[][0]
""",
    "ends_in_order": """
import atexit, sys, threading
class Late:
    def __del__(self): print('deleted')
late = Late()
atexit.register(print, 'atexit')
def work():
    threading.main_thread().join()
    print('thread', threading.current_thread().daemon)
threading.Thread(target=work).start()
sys.stdout.write('unfinished line')
raise ValueError('main')
""",
    "fails_in_a_thread": """
import threading
t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()
print(threading.enumerate(), threading.current_thread(), threading.active_count())
""",
    "has_processes": """
import multiprocessing as mp, os, sys
def double(x): return 2 * x
class Box:
    def __init__(self, x): self.x = x
if __name__ == '__main__':
    print(mp.current_process().name, mp.parent_process())
    for method in ('spawn', 'fork', 'forkserver'):
        with mp.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [1, 2]), pool.apply(Box, (3,)).x)
            pool.close(); pool.join()
""",
    "pickles": """
import pickle
class A: pass
def f(): pass
print(pickle.loads(pickle.dumps(A())).__class__ is A)
print(pickle.loads(pickle.dumps(f)) is f)
import __main__
print(__main__.A is A, A.__module__)
""",
    "shows_its_source": """
import inspect, linecache
def f():
    return 'body'
print(inspect.getsource(f), linecache.getline(__file__, 2), inspect.getfile(f))
""",
    "forks": """
import os
pid = os.fork()
if pid == 0:
    print('child'); os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "runs_others": """
import subprocess, sys
print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.path[0] == "")'],
    capture_output=True, text=True))
""",
    "has_default_signals": """
import signal
print([(s.name, signal.getsignal(s)) for s in signal.Signals
    if signal.getsignal(s) is not signal.SIG_DFL])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
""",
    "has_few_descriptors": """
import os
found = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')
    if os.path.exists(f'/proc/self/fd/{n}')]
print(sorted(n.partition(':')[0] for n in found if not n.startswith('socket')))
""",
    "imports_a_neighbour": "import neighbour; print(neighbour.__file__)",
    "leaves_a_generator": "def g():\n  try: yield\n  finally: print('closed')\n"
    "i = g(); next(i)",
    "exits_in_a_thread": "import threading, sys\n"
    "t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()",
    "breaks_its_stdout": "import os, sys; os.close(1); sys.stdout.write('x')\n",
    "hooks_faults": "import faulthandler; print(faulthandler.is_enabled())",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of every kind; some have names as awkward as those of users."""
    tmp_path = tmp_path_factory.mktemp("programs")
    for name, text in SCRIPTS.items():
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / f"{name}.py").write_bytes(data)
    (tmp_path / "neighbour.py").write_text("")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')")
    (package / "__main__.py").write_text(
        "import sys; print(sys.argv, sys.path[0], __file__, __spec__.name, __package__)"
        "\n[][0]"
    )
    (package / "part.py").write_text("import sys\nprint(sys.argv, __name__)\n")
    (tmp_path / "odd 'näme'").mkdir()
    (tmp_path / "odd 'näme'" / "a b.py").write_text("print(__file__)\nraise ValueError")
    (tmp_path / "link.py").symlink_to(tmp_path / "odd 'näme'" / "a b.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.path[0], __file__)")
    py_compile.compile(
        str(tmp_path / "says_hello.py"), cfile=str(tmp_path / "compiled.pyc")
    )
    return tmp_path


OTHERS = [
    ["./fails.py"],
    ["package/../fails.py"],
    ["odd 'näme'/a b.py", "--flag", "", "ä b"],
    ["link.py"],
    ["no_such_file.py"],
    ["package"],
    ["neighbour.py/x"],
    ["odd 'näme'"],
    ["archive.zip", "arg"],
    ["compiled.pyc"],
    ["-m", "package", "x"],
    ["-m", "package.part", "-m"],
    ["-m", "no_such_module"],
    ["-m", "no_such_package.x"],
    ["-m", "says_hello"],
    ["-c", "import sys; print(sys.argv, sys.path[0] == '', sorted(globals()))", "-c"],
    ["-c", "1/0"],
    ["-c", "x = ="],
    ["-c", "import neighbour; print(__annotations__, __builtins__)"],
]
PROGRAMS = [[f"{name}.py", "arg"] for name in SCRIPTS] + OTHERS

COLD_IN_DEFAULT_TIER = [
    *("shows_itself", "exits_with_words", "fails_in_a_chain", "has_a_syntax_error"),
    *("is_killed", "ends_in_order", "has_processes", "pickles", "has_few_descriptors"),
    *("has_default_signals", "imports_a_neighbour"),
]
"""A cold start differs from a warm one in what the interpreter itself begins with."""
ENV = {"PYTHONUNBUFFERED": "1"}


def plain(argv: list[str], cwd: Path, *options: str) -> Ended:
    found = subprocess.run(
        [sys.executable, *options, *argv],
        cwd=cwd,
        env={**os.environ, **ENV},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return Ended(found.returncode, found.stdout.decode(errors="replace"))


@pytest.fixture(scope="module")
def by_python(folder: Path) -> Callable[[list[str]], Ended]:
    """Runs a program in the folder with Python itself, once per command line."""

    @functools.cache
    def ended(*argv: str) -> Ended:
        return plain([*argv], folder)

    return lambda argv: ended(*argv)


def comparable(output: str) -> str:
    """The output without addresses and thread numbers."""
    output = re.sub(r"0x[0-9a-f]+", "0x", output)
    return re.sub(r"started \d+", "started", output)


def words(argv: list[str]) -> str:
    return " ".join(argv)


def _cold(argv: list[str]) -> Any:
    script = argv[0].removesuffix(".py")
    in_default = script in COLD_IN_DEFAULT_TIER or argv in (["package"], OTHERS[-1])
    marks = () if in_default else (pytest.mark.slow,)
    return pytest.param(argv, id=words(argv), marks=marks)


@pytest.mark.parametrize("argv", [_cold(argv) for argv in PROGRAMS])
def test_cold_is_like_python(
    argv: list[str], folder: Path, by_python: Callable[[list[str]], Ended]
) -> None:
    expected = by_python(argv)
    found = start_cold(["run", *argv], folder, ENV).end()
    assert comparable(found.output) == comparable(expected.output)
    assert found.status == expected.status


@pytest.mark.tensorflow
@pytest.mark.parametrize("argv", PROGRAMS, ids=words)
def test_warm_is_like_python(
    argv: list[str],
    folder: Path,
    by_python: Callable[[list[str]], Ended],
    warm: WarmInterpreter,
) -> None:
    expected = by_python(argv)
    found = warm.start(["run", *argv], folder).end()
    assert comparable(found.output) == comparable(expected.output)
    assert found.status == expected.status


@pytest.mark.parametrize(
    ("argv", "causes"),
    [
        (["-c", "import foo_bar"], ["ModuleNotFoundError: No module named 'foo_bar'"]),
        (["-c", "raise ValueError('a\\nb')"], ["ValueError: a"]),
        (["-c", "x = ="], ["SyntaxError: invalid syntax"]),
        (["-c", "import sys; sys.exit('no data')"], ["no data"]),
        (["-c", "import sys; sys.exit(2)"], []),
        (["-c", "raise KeyboardInterrupt"], []),
        (["-c", "pass"], []),
    ],
)
def test_the_cause_of_a_failure_is_reported(
    argv: list[str], causes: list[str], tmp_path: Path
) -> None:
    found = start_cold(["run", *argv], tmp_path).end()
    assert [event["cause"] for event in found.said("failure")] == causes


def test_a_broken_tensorflow_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("import no_such_library")
    (tmp_path / "train.py").write_text("import tensorflow as tf")
    expected = plain(["train.py"], tmp_path)
    found = start_cold(["run", "train.py"], tmp_path, ENV).end()
    assert (found.output, found.status) == (expected.output, 1)
    assert found.events == [
        {"type": "phase", "phase": "importing tensorflow"},
        {
            "type": "failure",
            "cause": "import tensorflow: ModuleNotFoundError: "
            "No module named 'no_such_library'",
        },
    ]


@pytest.mark.parametrize("strategy", ["collective", "none"])
def test_libraries_are_prepared_once_they_are_imported(
    strategy: str, tmp_path: Path
) -> None:
    """With libraries that import each other, like the real ones, and a fake runtime."""
    for name, text in {
        "tensorflow/__init__.py": "print('tf begins')\nimport keras\nprint('tf ends')",
        "keras/__init__.py": "print('keras begins')\nimport tensorflow\n"
        "print('keras ends')",
        "train.py": """
import sys
if 'tfcluster' in sys.modules:
    from tfcluster.runtime.task import injection
    injection.install = lambda context: print('install', context.rank, context.strategy)
before = list(sys.meta_path)
print('begin')
import keras, tensorflow
print(keras.__loader__, keras.__spec__, vars(keras.__loader__))
print('end', len(sys.meta_path) - len(before))
""",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = start_cold(
        ["run", "train.py"], tmp_path, {**ENV, "TFCLUSTER_STRATEGY": strategy}
    ).end()
    expected = plain(["train.py"], tmp_path).output.replace("end 0", "end -1")
    if strategy == "collective":
        expected = expected.replace("keras ends", "keras ends\ninstall 0 collective")
    assert comparable(found.output) == comparable(expected)
    assert found.said("phase") == [{"type": "phase", "phase": "importing keras"}]


def test_a_program_without_tensorflow_does_not_pay_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys; print({'tensorflow', 'keras', 'numpy'} & set(sys.modules))"
    )
    env = {"TFCLUSTER_STRATEGY": "collective"}
    assert start_cold(["run", "train.py"], tmp_path, env).end().output == "set()\n"


_NULL_BYTE = pytest.param(
    b"x = 1\0\n",
    marks=pytest.mark.skipif(
        sys.version_info < (3, 11, 4), reason="this Python ignores what follows a NUL"
    ),
)


@pytest.mark.parametrize("source", [_NULL_BYTE, b"x = '\xe9'\n"])
def test_what_is_no_text_is_a_syntax_error(source: bytes, tmp_path: Path) -> None:
    """Python itself has two messages for this, depending on how it reads the file."""
    (tmp_path / "train.py").write_bytes(source)
    ended = start_cold(["run", "train.py"], tmp_path).end()
    assert ended.status == plain(["train.py"], tmp_path).status == 1
    assert ended.output.splitlines()[-1].startswith("SyntaxError: ")
    assert "Traceback" not in ended.output


def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    env = {"PYTHONSAFEPATH": "1"}
    expected = plain(["train.py"], tmp_path, "-P").output
    assert start_cold(["run", "train.py"], tmp_path, env).end().output == expected


def test_an_interrupt_ends_it_by_the_signal(tmp_path: Path) -> None:
    # Python does not see a signal that comes just before it begins to sleep.
    program = "import time; print('up'); [time.sleep(0.1) for _ in range(600)]"
    (tmp_path / "train.py").write_text(program)
    task = start_cold(["run", "train.py"], tmp_path, ENV)
    task.wait_for_output("up")
    os.kill(task.pid, signal.SIGINT)
    ended = task.end()
    assert ended.status == -signal.SIGINT
    assert ended.output.endswith("\nKeyboardInterrupt\n")
    assert "tfcluster" not in ended.output


@pytest.mark.parametrize("argv", [[], ["run"], ["fly", "x.py"], ["run", "-m"]])
def test_wrong_arguments_are_explained(argv: list[str], tmp_path: Path) -> None:
    ended = start_cold(argv, tmp_path).end()
    assert ended.status == 1
    assert ended.output.startswith("usage: bootstrap run SCRIPT")


def test_a_contradictory_environment_is_explained(tmp_path: Path) -> None:
    env = {"TF_CONFIG": "{", "TFCLUSTER_STRATEGY": "collective"}
    ended = start_cold(["run", "-c", "pass"], tmp_path, env).end()
    assert ended.status == 1
    assert ended.output.startswith("tfcluster: TF_CONFIG is not JSON: ")
    assert ended.said("failure")

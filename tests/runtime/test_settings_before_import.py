"""What a program does before it imports TensorFlow has effect, as with ``python``.

A task that is forked after the imports starts again where this matters.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiers import some
from tests.runtime.harness import Ended, WarmInterpreter

pytestmark = pytest.mark.tensorflow

START = "with open('starts', 'a') as file:\n    file.write('x')\n"


def run(warm: WarmInterpreter, folder: Path, source: str) -> Ended:
    (folder / "train.py").write_text(source)
    return warm.start(["run", "train.py"], folder).end()


def printed(ended: Ended) -> Any:
    assert ended.status == 0, ended.output
    return json.loads(ended.output.splitlines()[-1])


def reasons(ended: Ended) -> list[str]:
    """Why the task has started again."""
    texts = [str(event["text"]) for event in ended.said("cold_start")]
    return [text.split(" before ")[0].removeprefix("the program ") for text in texts]


IDIOMS = {
    "assigned": "os.environ['OMP_NUM_THREADS'] = '1'\n",
    "default": "os.environ.setdefault('OMP_NUM_THREADS', '1')\n",
    "updated": "os.environ.update(OMP_NUM_THREADS='1')\n",
    "put": "os.putenv('OMP_NUM_THREADS', '1')\n",
    "computed": "os.environ['_'.join(['OMP', 'NUM', 'THREADS'])] = '1'\n",
    "native": "import ctypes\nctypes.CDLL(None).setenv(b'OMP_NUM_THREADS', b'1', 1)\n",
    "dotenv": (
        "for line in open('.env').read().splitlines():\n"
        "    os.environ.setdefault(*line.split('='))\n"
    ),
    "library": "import settings\n",
}


@pytest.mark.parametrize("idiom", some(IDIOMS, "assigned", slow=["native", "library"]))
def test_a_variable_that_is_set_in_any_way_has_effect(
    warm: WarmInterpreter, tmp_path: Path, idiom: str
) -> None:
    (tmp_path / ".env").write_text("OMP_NUM_THREADS=1\n")
    (tmp_path / "settings.py").write_text(f"import os\n{IDIOMS['assigned']}")
    source = (
        f"import json, os\n{START}{IDIOMS[idiom]}"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import numpy as np\n"
        "threads = len(os.listdir('/proc/self/task')) - before\n"
        "print(json.dumps([os.environ['TFCLUSTER_EVENTS_OWNER'], os.getpid(),\n"
        "    threads]))\n"
    )
    ended = run(warm, tmp_path, source)
    owner, pid, threads = printed(ended)
    assert (owner, threads) == (str(pid), 0)
    assert reasons(ended) == ["sets OMP_NUM_THREADS"]
    # If the program, or a module beside it, names the variable, the task starts cold
    # before it does anything.
    early = idiom not in ("computed", "native", "dotenv")
    assert (tmp_path / "starts").read_text() == ("x" if early else "xx")


def test_an_import_draws_what_it_draws_alone(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    """A program may seed Python's generator before it imports Keras, which draws."""
    source = (
        "import json, random\nrandom.seed(3)\nimport keras\nimport tensorflow\n"
        "print(json.dumps(random.random()))\n"
    )
    alone = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert printed(run(warm, tmp_path, source)) == json.loads(alone.stdout)


EFFECTS = {
    "TF_ENABLE_ONEDNN_OPTS": (
        "0",
        "from tensorflow.python.util import _pywrap_util_port as port\n"
        "found = str(int(port.IsMklEnabled()))\n",
    ),
    "TF_USE_LEGACY_KERAS": (
        "1",
        "import tensorflow as tf\nfound = str(int(tf._tf_uses_legacy_keras))\n",
    ),
    "KERAS_HOME": (
        "home",
        "import keras\nfound = 'home' if keras.config.floatx() == 'float64' else '?'\n",
    ),
    "XLA_FLAGS": (
        "--xla_no_such_flag=1",
        "import subprocess, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import tensorflow as tf\n"
        "    tf.function(lambda: tf.constant(1) + 1, jit_compile=True)()\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "found = os.environ['XLA_FLAGS'] if status else '?'\n",
    ),
    "CUDA_VISIBLE_DEVICES": (
        "-1",
        "import ctypes, tensorflow\n"
        "getenv = ctypes.CDLL(None).getenv\n"
        "getenv.restype = ctypes.c_char_p\n"
        "found = getenv(b'CUDA_VISIBLE_DEVICES').decode()\n",
    ),
}


@pytest.mark.parametrize("name", some(EFFECTS, "KERAS_HOME", slow=["XLA_FLAGS"]))
def test_variables_have_the_effect_that_they_have_in_python(
    warm: WarmInterpreter, tmp_path: Path, name: str
) -> None:
    value, look = EFFECTS[name]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keras.json").write_text('{"floatx": "float64"}')
    source = (
        f"import json, os\nos.environ['{name}'] = '{value}'\n{look}"
        "print(json.dumps(found))\n"
    )
    ended = run(warm, tmp_path, source)
    assert printed(ended) == value
    # Libraries read the devices when TensorFlow is first used.
    late = name == "CUDA_VISIBLE_DEVICES"
    assert reasons(ended) == ([] if late else [f"sets {name}"])


HARMLESS = {
    "nothing": "",
    "other names": "os.environ.update(PYTHONHASHSEED='0', WANDB_MODE='offline')\n",
    "same values": (
        "os.environ['KERAS_BACKEND'] = 'tensorflow'\n"
        "os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')\n"
    ),
    "files": "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (512, 512))\n",
    "folders": "sys.path.insert(0, os.path.join(os.getcwd(), 'lib'))\n",
    "only asked": (
        "import importlib.util\nassert importlib.util.find_spec('tensorflow').origin\n"
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_tasks_stay_warm_otherwise(
    warm: WarmInterpreter, tmp_path: Path, case: str
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helpers.py").write_text("")
    source = (
        "import json, os, sys\n"
        "before = [name in sys.modules for name in ('tensorflow', 'numpy')]\n"
        "before.append('TF2_BEHAVIOR' in os.environ)\n"
        f"{HARMLESS[case]}"
        "import numpy as np, tensorflow as tf\n"
        "import keras.layers\n"
        "assert tf.__spec__.name == 'tensorflow' and sys.modules['keras'] is keras\n"
        "assert type(os.putenv) is type(len)\n"
        "assert not [f for f in sys.meta_path if 'Hidden' in type(f).__name__]\n"
        "print(json.dumps([before, os.environ['TF2_BEHAVIOR'],\n"
        "    float(tf.reduce_sum(np.ones(3)))]))\n"
    )
    ended = run(warm, tmp_path, source)
    assert printed(ended) == [[False, False, False], "1", 3.0]
    assert reasons(ended) == []


def test_variables_that_are_set_after_the_import_are_left_alone(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    source = "import tensorflow, os\nos.environ['OMP_NUM_THREADS'] = '1'\nprint(1)\n"
    ended = run(warm, tmp_path, source)
    assert (printed(ended), reasons(ended)) == (1, [])


OTHERS = {
    "another keras": (
        "sys.path.insert(0, os.path.abspath('lib'))\nimport keras\n",
        "has another keras on its sys.path",
    ),
    "in another folder": (
        "os.chdir('lib')\nsys.path.insert(0, '')\nimport keras\n",
        "has another keras on its sys.path",
    ),
    "a module of its own": (
        "import types\nsys.modules['h5py'] = types.ModuleType('h5py')\n"
        "import tensorflow\n",
        "has its own module h5py",
    ),
    "a module of Python's name": (
        "sys.path.insert(0, os.path.abspath('lib'))\nimport tensorflow\n",
        "has 'tarfile' in",
    ),
    "a module that was missing": (
        "sys.path.append(os.path.abspath('lib'))\nimport tensorflow\n",
        "has 'objgraph' in",
    ),
    "a limit": (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40))\n"
        "import numpy\n",
        "sets RLIMIT_DATA",
    ),
}


@pytest.mark.parametrize(
    "case", some(OTHERS, "another keras", slow=["a module of Python's name"])
)
def test_what_else_an_import_depends_on(
    warm: WarmInterpreter, tmp_path: Path, case: str
) -> None:
    lines, reason = OTHERS[case]
    (tmp_path / "lib").mkdir()
    if "keras" in lines:
        (tmp_path / "lib" / "keras.py").write_text("")
    if "missing" in case:
        (tmp_path / "lib" / "objgraph.py").write_text("")
    if "Python" in case:
        (tmp_path / "lib" / "tarfile.py").write_text("raise ImportError('mine')\n")
    source = (
        "import json, os, sys\n"
        "print(json.dumps([os.getcwd(), os.umask(0o027)]), flush=True)\n"
        f"{lines}"
        "print(json.dumps(getattr(sys.modules.get('keras'), '__file__', '')))\n"
    )
    ended = run(warm, tmp_path, source)
    [found] = reasons(ended)
    assert found.startswith(reason)
    # The second start finds what the first one found.
    first, second = [line for line in ended.output.splitlines() if "[" in line][:2]
    assert first == second
    if "Python" in case:
        assert ended.output.endswith("ImportError: mine\n")
    elif "keras" in lines:
        assert printed(ended) == str(tmp_path / "lib" / "keras.py")
    else:
        assert ended.status == 0, ended.output


@pytest.mark.slow
def test_settings_of_keras_that_the_program_writes(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    source = (
        "import json, os, pathlib\n"
        "os.environ['-HOME'[1:]] = os.getcwd()\n"
        "pathlib.Path('.keras').mkdir(exist_ok=True)\n"
        "pathlib.Path('.keras/keras.json').write_text('{\"floatx\": \"float16\"}')\n"
        "import keras\n"
        "print(json.dumps(keras.config.floatx()))\n"
    )
    ended = run(warm, tmp_path, source)
    assert (printed(ended), reasons(ended)) == ("float16", ["sets HOME"])


def test_forked_children_keep_what_was_imported_and_warn(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    source = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.environ['-OMP_NUM_THREADS'[1:]] = '1'\n"
        "    import numpy\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ended = run(warm, tmp_path, source)
    assert (ended.status, reasons(ended)) == (0, [])
    assert "warning: a forked process sets OMP_NUM_THREADS" in ended.output


def test_python_options_reach_the_program(tmp_path: Path) -> None:
    from tfcluster.plan.compose import parse

    command = ["python", "-X", "dev", "-W", "error", "train.py"]
    assert not parse(command, (sys.executable,)).forkable


def test_another_backend_is_refused_as_it_is_from_the_shell(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n"
    )
    env = {"TFCLUSTER_STRATEGY": "collective", "TFCLUSTER_RANK": "0"}
    config = {"cluster": {"worker": ["localhost:1"]}}
    config["task"] = {"type": "worker", "index": 0}  # type: ignore[dict-item]
    env["TF_CONFIG"] = json.dumps(config)
    ended = warm.start(["run", "train.py"], tmp_path, env).end()
    assert ended.status == 1
    expected = "KERAS_BACKEND is 'jax' in its environment, but tfcluster can distribute"
    assert expected in ended.output.splitlines()[-1]

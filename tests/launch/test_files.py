"""Files of several ranks are those of one machine: see ``tfcluster.runtime.files``."""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left
from tfcluster.runtime.files.layers import Layers, enter

PR_SET_DUMPABLE = 4

OPTIONS = ("--set", "runtime.require_exchange=false")
FAIL = {"TFCLUSTER_FILES_FAIL": "1"}


def can_have_layers() -> bool:
    """Whether this machine allows an overlay in a namespace of mounts."""
    line = (
        "mount -t tmpfs none /mnt && cd /mnt && mkdir l u w m && "
        "mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w m"
    )
    options = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    try:
        done = subprocess.run(
            ["unshare", *options, "sh", "-c", line], capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


needs_layers = pytest.mark.skipif(
    not can_have_layers(), reason="this machine allows no overlay in a namespace"
)


def launch(
    cluster: Cluster,
    program: str,
    *options: str,
    count: int = 2,
    environ: Mapping[str, str] | None = None,
) -> Running:
    folder = cluster.folder / "work"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(program)
    words = ("-n", str(count), "--set", f"workdir={folder}", *OPTIONS, *options)
    return cluster.start(*words, "--", sys.executable, "train.py", environ=environ)


def work(cluster: Cluster) -> Path:
    return cluster.folder / "work"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- changes of all kinds -------------------------------------------------------------

EVERYTHING = """
import json, os, pathlib, shutil, sqlite3, subprocess, zipfile
import numpy as np

if os.path.exists("old"):
    shutil.rmtree("old")
os.mkdir("out")  # fails if it exists
for number in range(20):
    with open("out/log.txt", "a") as file:
        file.write(f"{number}\\n")
    if number % 5 == 0:
        os.mkdir(f"out/{number}")
        np.save(f"out/{number}/a.npy", np.arange(number))
        with open(f"out/{number}/a.json", "w") as file:
            json.dump(number, file)
        os.rename(f"out/{number}", f"out/new-{number}")
        os.remove(f"out/new-{number}/a.json")
with zipfile.ZipFile("out/a.zip", "x") as file:
    for number in range(10):
        file.writestr(f"in/{number}", str(number))  # with its time
assert not os.path.isdir("data")
with zipfile.ZipFile("out/a.zip") as file:
    file.extractall("data")
subprocess.run(["mkdir", "by-command"], check=True)
subprocess.run("echo a >> by-command/a; mkdir by-command/b", shell=True, check=True)
assert os.system("mkdir by-shell") == 0
database = sqlite3.connect("a.sqlite")
database.execute("create table t (x)")
database.close()
os.rename("before", "after")
elsewhere = pathlib.Path("../elsewhere")
elsewhere.mkdir()
(elsewhere / "a.txt").write_text("a")
assert len(open("out/log.txt").read().split()) == 20
print("done", flush=True)
"""


def prepare(cluster: Cluster) -> None:
    (work(cluster) / "old" / "deep").mkdir(parents=True)
    (work(cluster) / "before").mkdir()
    (work(cluster) / "before" / "kept").write_text("kept")


STARTS_AGAIN = """
import os
if False: import tensorflow
open("begun", "w").close()
os.environ["TF_" + "DETERMINISTIC_OPS"] = "1"  # the rank starts again
os.mkdir("out")  # fails if it exists
open("out/log.txt", "a").close()
os.remove("begun")
print(sorted(os.listdir(".")), flush=True)
"""


@needs_layers
def test_a_rank_that_starts_again_gets_a_layer_again(cluster: Cluster) -> None:
    running = launch(cluster, STARTS_AGAIN, count=3)
    assert running.end() == 0, running.err
    assert "starts in a fresh interpreter" in running.err
    assert "warning: worker" not in running.err
    for rank in range(3):
        assert running.text(f"worker:{rank}") == "['out', 'train.py']\n"
    assert names(work(cluster)) == ["out", "train.py"]
    assert "other files than the chief" not in running.err


@needs_layers
@pytest.mark.parametrize("count", [2, 3])
def test_changes_are_made_once(cluster: Cluster, count: int) -> None:
    prepare(cluster)
    running = launch(cluster, EVERYTHING, count=count)
    assert running.end() == 0, running.err
    assert "warning: worker" not in running.err
    for rank in range(count):
        assert running.text(f"worker:{rank}") == "done\n"
    folder = work(cluster)
    assert (folder / "out" / "log.txt").read_text().split() == [*map(str, range(20))]
    assert names(folder / "out") == ["a.zip", "log.txt", *NEW]
    assert names(folder / "out" / "new-5") == ["a.npy"]
    assert len(names(folder / "data" / "in")) == 10
    assert (folder / "by-command" / "a").read_text() == "a\n"
    assert (folder / "after" / "kept").read_text() == "kept"
    assert (cluster.folder / "elsewhere" / "a.txt").read_text() == "a"
    assert names(folder) == TREE
    assert not (running.folder / "files").exists()
    assert_nothing_left(running)


NEW = ["new-0", "new-10", "new-15", "new-5"]
TREE = ["a.sqlite", "after", "by-command", "by-shell", "data", "out", "train.py"]


ELSEWHERE = """
import os, shutil, sys, tempfile, keras

out = os.path.abspath("../there")
with open(f"{out}/used.txt", "a") as file:
    file.write("used\\n")
os.rename(f"{out}/old", f"{out}/renamed")
os.rename(out, f"{out}.bak")
os.mkdir(out)
open(f"{out}/new.txt", "w").close()
shutil.rmtree(out)
os.makedirs(f"{out}/sub")
open(f"{out}/sub/new.txt", "w").close()
shutil.rmtree(os.path.abspath("../rest"))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
with tempfile.TemporaryDirectory() as folder:
    model.save(f"{folder}/a.keras")
assert not os.path.exists(folder)
print("done", flush=True)
"""


@pytest.mark.slow
@needs_layers
@pytest.mark.tensorflow
def test_folders_elsewhere_are_removed_and_renamed(cluster: Cluster) -> None:
    (cluster.folder / "there" / "old").mkdir(parents=True)
    (cluster.folder / "rest" / "deep").mkdir(parents=True)
    (cluster.folder / "rest" / "deep" / "a.txt").touch()
    running = launch(cluster, ELSEWHERE, count=3)
    assert running.end() == 0, running.err
    assert "and another rank does not" not in running.err
    assert names(cluster.folder / "there.bak") == ["renamed", "used.txt"]
    assert (cluster.folder / "there.bak" / "used.txt").read_text() == "used\n"
    assert names(cluster.folder / "there") == ["sub"]
    assert names(cluster.folder / "there" / "sub") == ["new.txt"]
    assert not (cluster.folder / "rest").exists()
    assert not (running.folder / "files").exists()


SUMMARIES = """
import tensorflow as tf
writer = tf.summary.create_file_writer("events")
scale = tf.Variable(1.0)

@tf.function
def step(batch):
    loss = tf.reduce_mean(batch * scale)
    with writer.as_default():
        tf.summary.write("loss", loss, step=0)
    scale.assign_sub(0.1 * loss)

for _ in range(3):
    step(tf.ones((8, 4)))
writer.close()
"""


@needs_layers
@pytest.mark.tensorflow
def test_summaries_of_a_divided_function_are_the_chiefs(cluster: Cluster) -> None:
    running = launch(cluster, SUMMARIES)
    assert running.end() == 0, running.err
    folder = cluster.folder / "work"
    assert len(names(folder / "events")) == 1
    assert ".tfcluster-events" not in names(folder)


TEMPORARY = """
import os, pathlib, tempfile

with tempfile.NamedTemporaryFile("w", dir="/tmp") as file:
    file.write("a")
elsewhere = pathlib.Path("../elsewhere")
for name in ("one", "two"):
    elsewhere.joinpath(name).mkdir(parents=True)
    elsewhere.joinpath(name, "a.txt").write_text("a")
print("done", flush=True)
"""


@needs_layers
def test_folders_elsewhere_are_private_after_a_temporary_file(cluster: Cluster) -> None:
    """Python opens the folder of a temporary file as if to write to it."""
    running = launch(cluster, TEMPORARY)
    assert running.end() == 0, running.err
    assert names(cluster.folder / "elsewhere") == ["one", "two"]
    assert_nothing_left(running)


def may_unshare_as_root() -> bool:
    """Whether this is root, who can give up the right to mount."""
    return os.geteuid() == 0


@needs_layers
@pytest.mark.skipif(not may_unshare_as_root(), reason="every user needs it anyway")
def test_a_user_without_the_right_to_mount(cluster: Cluster) -> None:
    prepare(cluster)
    (work(cluster) / "train.py").write_text(EVERYTHING)
    words = ("-n", "2", "--set", f"workdir={work(cluster)}", *OPTIONS)
    less = ("setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "tfcluster")
    running = cluster.start(*words, "--", sys.executable, "train.py", command=less)
    assert running.end() == 0, running.err
    assert running.text("worker:1") == "done\n"
    assert names(work(cluster)) == TREE
    assert_nothing_left(running)


AGAIN = """
import os
for number in range(300):
    with open("lock", "x") as file:
        file.write(str(number))
    os.remove("lock")
    os.makedirs("folder/inner")
    os.rmdir("folder/inner")
    os.rename("folder", "renamed")
    assert sorted(os.listdir()) == ["renamed", "train.py"]
    os.rmdir("renamed")
print("done", flush=True)
"""


@needs_layers
def test_what_is_removed_is_gone_although_the_chief_makes_it_later(
    cluster: Cluster,
) -> None:
    running = launch(cluster, AGAIN, count=3)
    assert running.end() == 0, running.err
    assert "and another rank does not" not in running.err
    assert names(work(cluster)) == ["train.py"]


# --- programs whose ranks differ ------------------------------------------------------

DIFFERING = """
import os, time
name = os.environ["TFCLUSTER_" "TASK"][-1]  # hides from the search for such words
if name == "0":
    os.mkdir("of-the-chief")
else:
    open("of-another", "w").write("unequal")
print("done", flush=True)
"""


@needs_layers
def test_ranks_that_change_other_files(cluster: Cluster) -> None:
    """The chief goes on, with a line, as soon as the other rank has ended."""
    running = launch(cluster, DIFFERING, "--set", "runtime.files=private")
    assert running.end() == 0, running.err
    assert names(work(cluster)) == ["of-the-chief", "train.py"]
    kept = running.folder / "files" / f"rank-1{work(cluster)}" / "of-another"
    assert kept.read_text() == "unequal"
    assert "other files than the chief" in running.err
    assert str(work(cluster) / "of-another") in running.err


WAITING = """
import os, time
from tfcluster.runtime.files import order
rank = os.environ["TFCLUSTER_RANK"]
if rank == "1":
    order.enter_exchange(1, 2)
    while True:
        time.sleep(1)
time.sleep(0.1)
os.mkdir("a")
print("done", flush=True)
os.kill(os.getppid(), 0)
"""


@needs_layers
def test_a_rank_that_waits_for_the_chief_is_not_waited_for(cluster: Cluster) -> None:
    running = launch(cluster, WAITING, "--set", "runtime.files=private")
    running.wait_for_text("done", "worker:0")
    assert "train.py:10 changes a, and another rank does not" in running.text(
        "worker:0"
    )
    running.signal(signal.SIGTERM)
    running.end()
    assert_nothing_left(running)


AWARE = """
import os
rank = os.environ["TFCLUSTER_RANK"]
open(f"of-{rank}", "w").write(rank)
"""


def test_a_program_that_knows_ranks_shares_its_files(cluster: Cluster) -> None:
    running = launch(cluster, AWARE)
    assert running.end() == 0, running.err
    assert names(work(cluster)) == ["of-0", "of-1", "train.py"]


def test_files_may_be_shared(cluster: Cluster) -> None:
    program = "open('log.txt', 'a').write('line\\n')"
    running = launch(cluster, program, "--set", "runtime.files=shared")
    assert running.end() == 0, running.err
    assert (work(cluster) / "log.txt").read_text() == "line\n" * 2


# --- ends -----------------------------------------------------------------------------

KILLED = """
import os, time
open("a.txt", "w").write("a")
print(f"pid {os.getpid()} is up", flush=True)
time.sleep(600)
"""


@needs_layers
def test_nothing_is_left_of_a_rank_that_is_killed(cluster: Cluster) -> None:
    running = launch(cluster, KILLED)
    running.wait_for_text(" is up\n", "worker:0", "worker:1")
    pid = int(running.text("worker:1").split()[1])
    mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    assert str(work(cluster)) in mounts
    os.kill(pid, signal.SIGKILL)
    assert running.end() != 0
    assert str(work(cluster)) not in Path("/proc/self/mountinfo").read_text()
    assert names(work(cluster)) == ["a.txt", "train.py"]
    assert not (running.folder / "files").exists()
    assert_nothing_left(running)


# --- without layers -------------------------------------------------------------------


def test_without_layers_an_error_has_its_cause(cluster: Cluster) -> None:
    program = "import os\nos.mkdir('out')\n"
    running = launch(cluster, program, environ=FAIL)
    assert running.end() == 1
    cause = running.report()["first_failure"]["cause"]
    assert "FileExistsError" in cause
    assert f"both change {work(cluster)}/out (train.py:2)" in cause


def test_without_layers_a_file_of_two_ranks_is_warned_of(cluster: Cluster) -> None:
    running = launch(cluster, "open('a.txt', 'a').write('a')", environ=FAIL)
    assert running.end() == 0
    assert f"both change {work(cluster)}/a.txt (train.py:1)" in running.err


# --- Keras ----------------------------------------------------------------------------

KERAS = """
import os
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(4)
assert not os.path.exists("best.keras")
x = np.random.normal(size=(64, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
os.mkdir("out")


class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open("out/own.csv", "a") as file:
            file.write(f"{epoch},{logs['loss']:.6f}\\n")


model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=[
    Own(),
    keras.callbacks.CSVLogger("out/log.csv"),
    keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
    keras.callbacks.BackupAndRestore("backup"),
])
assert len(open("out/log.csv").read().splitlines()) == 4
assert os.path.exists("best.keras")
keras.models.load_model("best.keras")
model.export("out/exported")
manager = tf.train.CheckpointManager(
    tf.train.Checkpoint(model=model), "out/checkpoints", max_to_keep=1
)
for number in (1, 2):
    manager.save()
    assert manager.latest_checkpoint.endswith(f"ckpt-{number}")
    assert tf.train.latest_checkpoint("out/checkpoints") == manager.latest_checkpoint
assert int(manager.checkpoint.save_counter) == 2
try:
    model.save("/proc/never.keras")
except Exception as error:
    print("not saved", flush=True)
with open("out/end.csv", "x") as file:
    file.write(open("out/log.csv").read())
"""


@needs_layers
@pytest.mark.slow
def test_keras(cluster: Cluster) -> None:
    running = launch(cluster, KERAS)
    assert running.end(timeout_s=150) == 0, running.err
    assert "other files than the chief" not in running.err
    folder = work(cluster)
    assert len((folder / "out" / "own.csv").read_text().splitlines()) == 3
    assert names(folder) == ["best.keras", "out", "train.py"]
    checkpoints = ["checkpoint", "ckpt-2.data-00000-of-00001", "ckpt-2.index"]
    assert names(folder / "out" / "checkpoints") == checkpoints
    assert "not saved" in running.text("worker:1")
    assert not (running.folder / "files").exists()
    assert_nothing_left(running)


TRAINS = """
import keras
import numpy as np

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
"""


@pytest.mark.slow
def test_an_evaluator_with_the_program_of_the_ranks_does_not_train(
    cluster: Cluster,
) -> None:
    (cluster.folder / "train.py").write_text(TRAINS)
    config = {
        "command": [sys.executable, "train.py"],
        "tasks": {"chief": 1, "evaluator": 1},
        "runtime": {"require_exchange": False},
    }
    running = cluster.start(cluster.file(json.dumps(config)))
    assert running.end(timeout_s=150) == 0, running.err
    assert "the evaluator runs the program of the ranks" in running.text("evaluator:0")


@needs_layers
def test_a_layer_gives_no_rights_that_its_user_has_not() -> None:
    place = Path(tempfile.mkdtemp())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                codecs.lookup("unicode_escape")  # a file that only root may read
                os.chown(place, 2, 2)
                os.setresgid(2, 2, 2)
                os.setresuid(2, 2, 2)
                # Otherwise /proc/self is still root's.
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
            layers = Layers(f"{place}/0", (f"{place}/0.files",))
            assert layers.can_cover("/etc")
            enter(helps=False)
            layers.cover("/etc")
            layers.cover(str(place))
            (place / "ours").write_text("")
            with pytest.raises(PermissionError):
                Path("/etc/tfcluster-test").write_text("")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        shutil.rmtree(place)

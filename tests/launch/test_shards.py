"""``runtime.shards`` under ``launch``: a lost rank changes no bit of the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = f"""
import hashlib, os, signal, sys
from argparse import Namespace
import keras

sys.path.insert(0, {str(ROOT / "examples")!r})
keras.utils.set_random_seed(7)


class Loses(keras.callbacks.Callback):
    '''Rank LOSES ends in the midst of the second epoch.'''

    def on_train_batch_end(self, batch, logs=None):
        last = "rank" + os.environ["TFCLUSTER_RANK"] == os.environ["LOSES"]
        first = os.environ["TFCLUSTER_ATTEMPT"] == "0"
        if last and first and (self.epoch, batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print("epoch", epoch, flush=True)


def train(model, x, y):
    backup = keras.callbacks.BackupAndRestore("backup")
    model.fit(
        x, y, batch_size=32, epochs=3, shuffle=False, verbose=0,
        callbacks=[backup, Loses()],
    )
    weights = b"".join(each.tobytes() for each in model.get_weights())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""
DIGITS = f"""{EXAMPLES}
import digits

(x, y), _ = digits.load_data()
train(digits.build_model(), x[:200], y[:200])
"""
WORDS = f"""{EXAMPLES}
import words

x, y = words.load_passages(24, 1 << 10)
model = words.build_model(Namespace(rows=1 << 10, width=8), int(y.max()) + 1)
train(model, x[:200], y[:200])
"""


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(DIGITS, id="digits"),
        pytest.param(WORDS, id="words", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_rank_changes_no_bit(cluster: Cluster, program: str) -> None:
    """Neither does the number of ranks: one is never interrupted."""
    (cluster.folder / "train.py").write_text(program)
    found = []
    for count, loses in ((3, "2"), (1, "none")):
        running = cluster.start(
            *("-n", str(count), "--set", "runtime.shards=4"),
            *("--set", "restart.max=1", "--set", f"env.LOSES=rank{loses}"),
            *("--", sys.executable, "train.py"),
        )
        assert running.end(240) == 0, running.err
        assert ("restart 1 of 1" in running.err) == (count > 1)
        said = [running.text(f"worker:{rank}") for rank in range(count)]
        assert all(each.count("epoch 0") == 1 for each in said), "it goes on"
        found += [each.rpartition("weights ")[2] for each in said]
        for path in (cluster.folder / "backup").rglob("*"):
            assert path.is_dir(), "the backup has been removed"
    assert len(set(found)) == 1, found
    assert len(found[0].strip()) == 64

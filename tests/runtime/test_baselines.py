"""The cache of baselines: what is stored, restored and deleted."""

from __future__ import annotations

from pathlib import Path

from tests.kit.baselines import KEPT, Baselines, digest_of


def test_what_is_kept_is_restored_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    baselines = Baselines(tmp_path / "kept")
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "one").mkdir(parents=True)
    (here / "one" / "0.out").write_text("said")
    (here / "one-0.npz").write_bytes(b"values")
    (here / "two-0.npz").write_bytes(b"of another job")
    assert not baselines.restore("a1", there)
    baselines.keep("a1", here, ["one", "one-0.npz"])
    assert baselines.restore("a1", there)
    assert (there / "one" / "0.out").read_text() == "said"
    assert (there / "one-0.npz").read_bytes() == b"values"
    assert not (there / "two-0.npz").exists()


def test_old_ones_go(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path)
    for number in range(KEPT + 2):
        baselines.keep(f"a{number}", tmp_path, [])
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == KEPT


def test_a_digest_is_of_all_that_the_outcome_depends_on(tmp_path: Path) -> None:
    source = tmp_path / "case.py"
    source.write_text("x = 1\n")
    digests = {
        digest_of(["case.py"], {}, [source]),
        digest_of(["case.py", "fit"], {}, [source]),
        digest_of(["case.py"], {"PARTS": "2"}, [source]),
    }
    assert digest_of(["case.py"], {}, [source]) in digests
    source.write_text("x = 2\n")
    assert digest_of(["case.py"], {}, [source]) not in digests
    assert len(digests) == 3

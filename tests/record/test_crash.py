"""Crash reports, which tfcluster saves after its own faults."""

from __future__ import annotations

from pathlib import Path

from tfcluster.record.crash import save_crash


def test_only_the_newest_stay(tmp_path: Path) -> None:
    environ = {"TFCLUSTER_STATE_DIR": str(tmp_path / "state")}
    first = save_crash(ValueError("one"), environ)
    assert first is not None
    assert "ValueError: one" in first.read_text()
    old = [
        first.with_name(f"crash-20200101-0000{second}-7.txt")
        for second in range(10, 30)
    ]
    for path in old:
        path.touch()
    other = first.with_name("notes.txt")
    other.touch()
    last = save_crash(ValueError("two"), environ)
    assert last is not None
    kept = sorted(first.parent.glob("crash-*.txt"))
    assert len(kept) == 10
    assert last in kept
    assert old[-1] in kept
    assert old[0] not in kept
    assert other.exists()

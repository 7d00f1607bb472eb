"""Tests of where the record is: private folders, run ids, and finding a run."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfcluster.base.errors import ConfigError, ResourceError
from tfcluster.base.task_id import TaskId
from tfcluster.record.events import Writer
from tfcluster.record.liveness import acquire
from tfcluster.record.paths import (
    RunPaths,
    create_run,
    find,
    new_run_id,
    refuse_open_folder,
    runs,
    state_dir,
    valid_name,
)
from tfcluster.record.run_locks import hold_name

NOON_S = 1795169700.0  # 2026-11-20 10:15:00 UTC
OTHER_UID = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def _state(tmp_path: Path) -> Path:
    return state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "state")})


def _refused(path: Path) -> str:
    with pytest.raises(ResourceError) as caught:
        state_dir({"TFCLUSTER_STATE_DIR": str(path)})
    assert caught.value.exit_code == 8
    assert caught.value.hint
    return "\n".join(caught.value.lines())


# --- the state folder ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TFCLUSTER_STATE_DIR": "{}/a", "XDG_STATE_HOME": "{}/b"}, "a"),
        ({"XDG_STATE_HOME": "{}/b", "HOME": "{}/h"}, "b/tfcluster"),
        ({"XDG_STATE_HOME": "relative", "HOME": "{}/h"}, "h/.local/state/tfcluster"),
        ({"TFCLUSTER_STATE_DIR": "", "HOME": "{}/h"}, "h/.local/state/tfcluster"),
    ],
)
def test_the_environment_says_where(
    environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    given = {key: value.format(tmp_path) for key, value in environ.items()}
    assert state_dir(given) == tmp_path / expected


def test_a_relative_folder_is_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert state_dir({"TFCLUSTER_STATE_DIR": "a/../b"}) == tmp_path / "b"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nothing_of_the_record_is_open_to_others(
    mask: int, tmp_path: Path, umask: Callable[[int], object]
) -> None:
    umask(mask)
    state = state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "new" / "state")})
    paths = create_run(state, "digits", NOON_S)
    lock, hold = acquire(paths), hold_name(state, "digits", paths.run, now_s=NOON_S)
    writer = Writer(paths)
    writer.append({"type": "note", "text": "x"})
    writer.progress({"worker:0": {"step": 1}})
    assert writer.close(5.0)
    hold.release()
    lock.release()
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) >= 9
    for path in made:
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path


def test_an_empty_folder_that_was_made_by_hand_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    found = state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "state")})
    assert found.stat().st_mode & 0o777 == 0o700


def test_an_open_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state" / "runs").mkdir(parents=True)
    (tmp_path / "state").chmod(0o755)
    text = _refused(tmp_path / "state")
    assert "open to others (0755)" in text
    assert f"chmod 700 {tmp_path / 'state'}" in text


def test_a_file_system_that_ignores_modes_is_named_as_the_reason(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)  # FAT shows all folders with one mode
    with pytest.raises(
        ResourceError, match=r"ignores file modes: .* is 0755, not 0700"
    ):
        refuse_open_folder(tmp_path, tmp_path.stat(), created=True)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert "state" in _refused(tmp_path / "state")


def test_a_parent_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert f"{tmp_path / 'open'} is writable by others (0777)" in _refused(
        tmp_path / "open" / "state"
    )
    (tmp_path / "open").chmod(0o1777)  # like /tmp: others cannot replace our files
    state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "open" / "state")})


def test_a_link_of_ours_may_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "link")})


def test_a_link_into_a_folder_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "real").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "real")
    assert "writable by others" in _refused(tmp_path / "link")


@as_root
@pytest.mark.parametrize("target", ["ours", "missing"])
def test_a_link_of_somebody_else_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    os.lchown(link, OTHER_UID, OTHER_UID)
    for path in (link, link / "state"):
        text = _refused(path)
        assert "link" in text
    assert not (tmp_path / "missing").exists()
    assert list((tmp_path / "ours").iterdir()) == []


@as_root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", OTHER_UID, OTHER_UID)
    assert f"belongs to uid {OTHER_UID}" in _refused(tmp_path / "state")


def test_a_link_planted_in_the_run_folder_is_not_followed(tmp_path: Path) -> None:
    paths = create_run(_state(tmp_path), "digits", NOON_S)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for planted in (paths.events, paths.lock):
        planted.symlink_to(victim)
    with pytest.raises(ResourceError):
        Writer(paths)
    with pytest.raises(ResourceError):
        acquire(paths)
    assert victim.read_text() == "precious"


# --- runs ----------------------------------------------------------------------------


def test_a_run_id_has_the_name_the_time_and_some_randomness() -> None:
    assert new_run_id("digits", NOON_S, lambda n: b"\x3f\x2a"[:n]) == (
        "digits-20261120-101500-3f2a"
    )


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "a b", "ä", "x" * 65, "a\0b"])
def test_a_name_that_could_leave_the_folder_is_none(name: str) -> None:
    assert not valid_name(name)
    with pytest.raises(ValueError, match="cannot be the name"):
        new_run_id(name, NOON_S)


def test_two_runs_of_one_second_that_draw_alike_get_two_folders(tmp_path: Path) -> None:
    state = _state(tmp_path)
    drawn = iter([b"\0\1", b"\0\1", b"\0\2"])
    first, second = (
        create_run(state, "digits", NOON_S, lambda _: next(drawn)) for _ in range(2)
    )
    assert first.run == "digits-20261120-101500-0001"
    assert second.run == "digits-20261120-101500-0002"


def test_paths_of_a_run() -> None:
    paths = RunPaths(Path("/s/runs/a-b-20261120-101500-3f2a"))
    assert paths.name == "a-b"
    assert paths.log(TaskId("worker", 3)) == paths.root / "logs" / "worker-3.log"


def test_runs_come_newest_first_whatever_they_are_called(tmp_path: Path) -> None:
    state = _state(tmp_path)
    made = [create_run(state, n, NOON_S + i).run for i, n in enumerate("zab")]
    (state / "runs" / "not a run").mkdir()
    assert [paths.run for paths in runs(state)] == made[::-1]


def test_runs_of_one_second_are_distinguished_by_their_plans(tmp_path: Path) -> None:
    state = _state(tmp_path)
    later = create_run(state, "a", NOON_S, lambda _: b"\0\1")
    sooner = create_run(state, "a", NOON_S, lambda _: b"\0\2")
    for age_s, paths in ((0, later), (5, sooner)):
        paths.plan.write_text("{}")
        os.utime(paths.plan, (NOON_S - age_s, NOON_S - age_s))
    assert runs(state) == [later, sooner]


def test_a_person_means_a_run_by_id_prefix_or_name(tmp_path: Path) -> None:
    state = _state(tmp_path)
    old = create_run(state, "digits", NOON_S, lambda _: b"\xaa\x01")
    new = create_run(state, "digits", NOON_S + 60, lambda _: b"\xaa\x02")
    other = create_run(state, "digits-large", NOON_S + 30, lambda _: b"\xaa\x03")
    assert find(state, None) == new
    assert find(state, old.run) == old
    assert find(state, "digits") == new  # the newest of that name, not "digits-large"
    assert find(state, "digits-20261120-1015") == old
    assert find(state, "digits-l") == other


@pytest.mark.parametrize("text", ["dig", "digits-2026", ""])
def test_what_several_runs_are_is_ambiguous_or_nothing(
    text: str, tmp_path: Path
) -> None:
    state = _state(tmp_path)
    made = [create_run(state, "digits", NOON_S + i) for i in range(7)]
    with pytest.raises(ConfigError) as caught:
        find(state, text)
    said = str(caught.value)
    assert made[-1].run in said  # only the newest are shown
    assert made[0].run not in said
    assert ("7 runs begin with this" in said) == bool(text)


def test_an_unknown_run_gets_a_suggestion(tmp_path: Path) -> None:
    state = _state(tmp_path)
    with pytest.raises(ConfigError, match="no runs yet"):
        find(state, "digist")
    run = create_run(state, "digits", NOON_S).run
    with pytest.raises(ConfigError, match=f"did you mean digits.*newest: {run}") as it:
        find(state, "digist")
    assert it.value.exit_code == 2


def test_a_run_cannot_be_made_where_nothing_can(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ResourceError, match="cannot make a folder"):
        create_run(tmp_path, "digits", NOON_S)

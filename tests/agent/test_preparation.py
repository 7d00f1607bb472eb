"""Setup lines that a real agent runs in a real bash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agent.client import Agent, marked
from tests.kit.waiting import eventually


def _prepare(agent: Agent, setup: str, **env: str) -> dict[str, Any]:
    log = str(agent.folder / "setup.log")
    cwd = str(agent.folder)
    agent.send(type="prepare", setup=setup, env=env, cwd=cwd, log=log)
    return agent.wait_for(lambda f: f["type"] in ("prepared", "unprepared"))


def test_what_the_lines_change_is_the_environment_of_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text("#!/bin/sh\n")
    (folder / "python").chmod(0o755)
    lines = [
        "export ONE='a  b' GIVEN=$GIVEN-seen",
        "if true; then",
        "  export TWO=$'first\\nsecond'",
        "fi",
        "unset LANGUAGE",
        "f() { false; return 0; }; f",
        "false || export THREE=3",
        f"PATH={folder}:$PATH",
        "[ -e /nowhere ] && export FOUR=4",
    ]
    with Agent(tmp_path / "a") as agent:
        answer = _prepare(agent, "\n".join(lines), GIVEN="here")
        assert answer["python"] == f"{folder}/python"
        agent.python("worker:0", "import os, json; print(json.dumps(dict(os.environ)))")
        agent.wait("exited", code=0)
        said = agent.log("worker:0").read_text()
        assert '"ONE": "a  b"' in said
        assert '"TWO": "first\\nsecond"' in said
        assert '"THREE": "3"' in said
        assert '"GIVEN": "here-seen"' in said
        assert f'"TFCLUSTER_RUN": "{agent.run}"' in said
        assert "FOUR" not in said
        assert "tfcluster_" not in said
        assert agent.close() == 0


def test_the_same_python_is_not_named(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        assert _prepare(agent, "export A=1")["python"] is None


@pytest.mark.parametrize(
    ("setup", "line", "cause", "last"),
    [
        ("echo fine\nexport A=1\nls /no/such", 3, "failed with exit status 2", "ls: "),
        ("true\n(exit 7)\ntrue", 2, "failed with exit status 7", None),
        ("true | (cat; exit 3)", 1, "failed with exit status 3", None),
        ("true\nif true; then", None, "were not read to their end (status ", "/dev/fd"),
        (
            "exit 5",
            None,
            "ended early: the lines or the login profile ended the shell, "
            "which ended with exit code 5",
            None,
        ),
        (
            "kill -9 $$",
            None,
            "ended early: the lines or the login profile ended the shell, "
            "which was killed by SIGKILL",
            None,
        ),
    ],
)
def test_a_line_that_fails(
    setup: str, line: int | None, cause: str, last: str | None, tmp_path: Path
) -> None:
    with Agent(tmp_path) as agent:
        answer = _prepare(agent, setup)
        assert answer["type"] == "unprepared"
        assert answer["line"] == line
        assert answer["cause"].startswith(cause)
        if last is not None:
            assert answer["tail"][-1].startswith(last)


def test_commands_may_fail_in_a_file_that_the_lines_source(tmp_path: Path) -> None:
    """conda's own files, for example, try what may not be there."""
    (tmp_path / "inner.sh").write_text("false\nexport INNER=1\n")
    with Agent(tmp_path / "a") as agent:
        assert _prepare(agent, f". {tmp_path}/inner.sh")["type"] == "prepared"
        agent.start("worker:0", "sh", "-c", "echo $INNER")
        agent.wait("exited", code=0)
        assert agent.log("worker:0").read_text() == "1\n"


def test_lines_that_never_end_are_ended_with_the_agent(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with Agent(tmp_path / "a") as agent:
        log = str(agent.folder / "setup.log")
        setup = f"sleep 1000 & touch {started}; wait"
        cwd = str(agent.folder)
        agent.send(type="prepare", setup=setup, env={}, cwd=cwd, log=log)
        eventually(started.exists, "the lines run")
        assert agent.close(grace_s=0) == 0
        eventually(lambda: not marked(agent.run), "everything has ended")

"""The end of a run whose launcher cannot write it any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfcluster.base.errors import ExitCode
from tfcluster.base.states import RunState
from tfcluster.record.files import replace_json
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import create_run, state_dir
from tfcluster.submit.job_status import settle


@pytest.mark.parametrize(
    ("state", "code", "of_tasks"),
    [
        (RunState.FAILED, ExitCode.START, "stopped"),
        (RunState.STOPPED, ExitCode.TERMINATED, "stopped"),
        (RunState.LOST, ExitCode.CONTACT_LOST, "lost"),
    ],
)
def test_a_run_that_has_ended_has_final_tasks_and_a_report(
    tmp_path: Path, state: RunState, code: ExitCode, of_tasks: str
) -> None:
    folder = state_dir({"TFCLUSTER_STATE_DIR": str(tmp_path / "state")})
    paths = create_run(folder, "test", 0.0)
    tasks = [{"task": f"worker:{index}", "host": "a"} for index in range(2)]
    replace_json(paths.plan, {"name": "test", "backend": "sge", "tasks": tasks})
    settle(paths, state, code, "job 3 is gone")
    view = read_run(paths, now_s=0.0)
    assert (view.state, view.exit_code) == (state, code)
    assert [str(task.state) for task in view.tasks] == [of_tasks] * 2
    assert json.loads(paths.report.read_text()) == json.loads(
        json.dumps(view.to_json(), default=str)
    )

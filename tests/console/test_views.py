"""Tests of the exact text of all views."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.console.test_sanitise import HOSTILE
from tests.kit.time_limits import allow_s
from tfcluster.base.states import RunState, TaskState
from tfcluster.console.display import Style
from tfcluster.console.sanitise import sanitise
from tfcluster.console.views import failures, plan, progress, status
from tfcluster.record.replay import replay
from tfcluster.record.run_status import (
    FailureView,
    FitView,
    HostView,
    ResultsView,
    RunView,
    TaskView,
)

T = 1795169700.0  # 2026-11-20 10:15:00 UTC
RUN = "digits-20261120-101500-3f2a"
LOGS = "/state/runs/x/logs"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _view(**extra: Any) -> RunView:
    return RunView(run=RUN, name="digits", backend="ssh", started_s=T, **extra)


def _task(name: str, state: str, **extra: Any) -> TaskView:
    return TaskView(task=name, state=TaskState(state), **extra)


FAILED = _view(
    state=RunState.FAILED,
    exit_code=1,
    ended_s=T + 302,
    since_s=T + 302,
    first_failure=FailureView(
        task="worker:1",
        host="node2",
        exit_code=3,
        signal=None,
        cause="ValueError: shapes do not match",
        log_tail=("Traceback (most recent call last):", "ValueError: shapes"),
        log=f"{LOGS}/worker-1.log",
    ),
    secondary=(
        FailureView(task="chief:0", host="node1", exit_code=1, signal=None, cause="x"),
        FailureView(
            task="worker:0", host="node1", exit_code=None, signal="SIGABRT", cause="x"
        ),
    ),
    tasks=(
        _task("chief:0", "failed", host="node1", exit_code=1, seconds=295.0),
        _task("worker:0", "failed", host="node1", signal="SIGABRT", seconds=296.2),
        _task(
            "worker:1",
            "failed",
            host="node2",
            exit_code=3,
            seconds=294.4,
            pid=4712,
            step=1200,
            steps_per_s=41.52,
            wait_share=0.019,
        ),
        _task(
            "ps:0",
            "stopped",
            host="node1",
            signal="SIGTERM",
            seconds=300.4,
            pid=4700,
            attempt=1,
        ),
    ),
)


# --- failures ------------------------------------------------------------------------


def test_hosts_that_failed_alike_are_in_the_order_of_the_run() -> None:
    hosts = tuple(HostView(host=f"node{n}") for n in (1, 2, 3, 4))

    def no_key(number: int) -> FailureView:
        host = f"node{number}"
        return FailureView(
            task=None, host=host, exit_code=None, signal=None, cause="no key"
        )

    first, late = no_key(1), tuple(map(no_key, (4, 3, 9, 2)))
    view = _view(hosts=hosts, first_failure=first, secondary=late)
    assert failures.failure(view)[1:] == ["node[2-4,9] (4 hosts): no key"]


def test_the_first_failure_then_its_victims() -> None:
    assert (
        _text(failures.failure(FAILED))
        == """\
first failure: worker:1 on node2: ValueError: shapes do not match (exit 3)
  | Traceback (most recent call last):
  | ValueError: shapes
  log: /state/runs/x/logs/worker-1.log
then also failed: chief:0 (exit 1), worker:0 (SIGABRT)
"""
    )
    assert failures.failure(_view()) == []


def _all_failed(cause: str, *others: str) -> RunView:
    causes = (cause, *others)
    first, *rest = (
        FailureView(
            task=f"worker:{rank}", host="a", exit_code=1, signal=None, cause=said
        )
        for rank, said in enumerate(causes)
    )
    tasks = tuple(_task(f"worker:{rank}", "failed") for rank in range(len(causes)))
    return _view(
        first_failure=first,
        secondary=tuple(rest),
        tasks=(*tasks, _task("ps:0", "stopped")),
    )


def test_what_all_ranks_failed_of_is_said_once() -> None:
    view = _all_failed(*["ValueError: no"] * 4)
    assert failures.failure(view) == [
        "first failure: worker:0 on a: ValueError: no (exit 1, all 4 ranks)"
    ]
    *_, last = failures.failure(_all_failed("ValueError: no", "ValueError: yes"))
    assert last == "then also failed: worker:1 (exit 1)"
    assert failures.outcome(view)[-1].split(None, 1) == ["ps:0", "not started"]


def test_a_race_says_that_all_ranks_run_the_script() -> None:
    race = "FileExistsError: [Errno 17] File exists: 'out'"
    _, hint, _ = failures.failure(_all_failed(race, "PeerLostError"))
    assert hint.startswith("  hint: all 2 ranks run the script at the same time")
    assert len(failures.failure(_all_failed(race, race))) == 1


def test_of_a_log_with_tracebacks_the_last_is_shown() -> None:
    traceback = "Traceback (most recent call last):"
    inner = ("    return func(*args)", "E0000 failed call", traceback, "inner")
    tail = (*inner, traceback, "ValueError: shapes")
    first = replace(FAILED.first_failure, log_tail=tail)  # type: ignore[type-var]
    text = _text(failures.failure(replace(FAILED, first_failure=first)))
    assert text.count("  | ") == 2
    assert f"  | {traceback}\n  | ValueError: shapes\n  log: " in text


def test_what_the_cause_says_already_is_not_said_twice() -> None:
    failure = FailureView(
        task="ps:0",
        host=None,
        exit_code=None,
        signal="SIGKILL",
        cause="killed by SIGKILL",
    )
    lines = failures.failure(replace(FAILED, first_failure=failure, secondary=()))
    assert lines == ["first failure: ps:0: killed by SIGKILL"]
    failure = FailureView(
        task=None, host="node2", exit_code=None, signal=None, cause="was lost"
    )
    lines = failures.failure(replace(FAILED, first_failure=failure, secondary=()))
    assert lines == ["first failure: node2: was lost"]


def test_many_victims_are_counted() -> None:
    victims = tuple(
        FailureView(task=f"worker:{i}", host="h", exit_code=1, signal=None, cause="x")
        for i in range(2000)
    )
    last = failures.failure(replace(FAILED, secondary=victims))[-1]
    assert last.endswith("worker:3 (exit 1), and 1,996 more")


def test_hosts_that_fail_alike_are_one() -> None:
    errors = {
        "node1": ["node1: Permission denied (publickey)", "key ~/.ssh/id_ed25519"],
        "gpu7": ["no route to host"],
        "node2": ["node2: Permission denied (publickey)", "key ~/.ssh/id_ed25519"],
        "node3": ["Permission denied (publickey)", "key ~/.ssh/id_ed25519"],
        "odd": [],
    }
    assert (
        _text(failures.fold_errors(errors))
        == """\
node[1-3] (3 hosts): Permission denied (publickey)
  key ~/.ssh/id_ed25519
gpu7: no route to host
odd: failed
"""
    )


# --- while it runs -------------------------------------------------------------------


def test_starting_says_what_is_waited_for_by_name() -> None:
    view = _view(
        hosts=(
            HostView(host="node1", state="ready"),
            HostView(host="node2", state="starting", since_s=T),
            HostView(host="node3", state="pending"),
        ),
        tasks=(_task("worker:0", "pending"),),
    )
    assert progress.starting(view, T + 3.9) == (
        "waiting for 2 of 3 hosts: node2 connecting, 3 s; node3 not asked yet"
    )
    ready = tuple(replace(host, state="ready") for host in view.hosts)
    view = replace(
        view,
        hosts=ready,
        tasks=(
            _task("worker:0", "running"),
            _task("worker:1", "starting", phase="importing tensorflow", since_s=T),
            _task("ps:0", "starting", since_s=T + 2),
            _task("ps:1", "running"),
        ),
    )
    assert progress.starting(view, T + 3) == (
        "waiting for 2 of 4 tasks: "
        "worker:1 importing tensorflow, 3 s; ps:0 starting, 1 s"
    )
    assert progress.starting(replace(view, tasks=()), T) == "starting"


def test_starting_folds_many() -> None:
    tasks = tuple(
        _task(f"worker:{i}", "starting", since_s=T, phase=f"phase {i // 800}")
        for i in range(3200)
    )
    assert progress.starting(_view(tasks=tasks), T + 60) == (
        "waiting for 3,200 of 3,200 tasks: worker:[0-799] phase 0, 60 s; "
        "worker:[800-1599] phase 1, 60 s; worker:[1600-2399] phase 2, 60 s; …"
    )


def test_running_says_how_fast_and_who_is_slowest() -> None:
    tasks = tuple(
        _task(
            f"worker:{i}",
            "running",
            step=1200 + (i == 0),
            steps_per_s=41.5,
            wait_share=share,
        )
        for i, share in enumerate((0.18, 0.16, 0.02))
    )
    view = _view(state=RunState.RUNNING, since_s=T, tasks=tasks)
    assert progress.running(view, T + 151) == (
        "running 2:31  step 1200  41.5 steps/s  waiting 12 %  (slowest worker:2)"
    )
    even = tuple(replace(task, wait_share=0.1) for task in tasks)
    assert progress.running(replace(view, tasks=even), T + 1) == (
        "running 0:01  step 1200  41.5 steps/s  waiting 10 %"
    )
    ended = (replace(tasks[0], state=TaskState.SUCCEEDED), *tasks[1:])
    assert progress.running(replace(view, tasks=ended), T).endswith(
        "1 of 3 tasks ended"
    )


def test_running_says_where_in_fit_it_is() -> None:
    fit = FitView(epoch=3, epochs=12, epoch_step=17, epoch_steps=23)
    task = _task(
        "worker:0",
        "running",
        step=63,
        steps_per_s=2.0,
        fit=fit,
        metrics={"accuracy": 0.5, "loss": 0.312456},
    )
    view = _view(state=RunState.RUNNING, since_s=T, tasks=(task,))
    assert progress.running(view, T + 151) == (
        "running 2:31  epoch 3/12  step 17/23  loss 0.3125  2.0 steps/s  1:46 left"
    )
    assert status.status(view, T)[-2:] == [
        "task      state    epoch   step  steps/s    loss  left",
        "worker:0  running   3/12  17/23      2.0  0.3125  1:46",
    ]
    unknown = replace(task, fit=FitView(epoch=3, epoch_step=17), metrics={"loss": None})
    assert progress.running(replace(view, tasks=(unknown,)), T + 151) == (
        "running 2:31  epoch 3  step 17  loss nan  2.0 steps/s"
    )
    ended = replace(task, state=TaskState.SUCCEEDED)
    assert ended.left_s is None
    assert replace(task, steps_per_s=0.0).left_s is None
    assert task.left_s == (10 * 23 - 17) / 2.0


def test_running_before_the_first_step() -> None:
    tasks = (
        _task("worker:0", "running", phase="joining"),
        _task("worker:1", "running", phase="joining"),
        _task("ps:0", "running", phase="serving"),
    )
    view = _view(state=RunState.RUNNING, since_s=T, tasks=tasks)
    assert progress.running(view, T) == "running 0:00  worker:[0-1] joining"
    assert progress.running(_view(tasks=()), T) == "running 0:00"
    alone = (_task("worker:0", "running", step=1, steps_per_s=0.123, wait_share=0.0),)
    assert (
        progress.running(_view(tasks=alone), T) == "running 0:00  step 1  0.123 steps/s"
    )
    unmeasured = (_task("worker:0", "running", step=1),)
    assert progress.running(_view(tasks=unmeasured), T) == "running 0:00  step 1"


def test_stopping_says_who_is_left() -> None:
    view = _view(state=RunState.STOPPING, since_s=T, tasks=FAILED.tasks)
    assert progress.stopping(view, T + 3) == "stopping 3 s"
    left = replace(view, tasks=(_task("ps:0", "stopping"), _task("ps:1", "running")))
    assert progress.stopping(left, T + 3) == "stopping 3 s: waiting for ps:[0-1]"


# --- at the end ----------------------------------------------------------------------


def test_the_outcome() -> None:
    assert (
        _text(failures.outcome(FAILED))
        == """\
task      host   end                    time
chief:0   node1  failed, exit 1   4 min 55 s
worker:0  node1  failed, SIGABRT  4 min 56 s
worker:1  node2  failed, exit 3   4 min 54 s  <- first failure
ps:0      node1  stopped          5 min 00 s
"""
    )


def test_the_outcome_of_very_many_tasks_is_what_went_wrong() -> None:
    tasks = [_task(f"worker:{i}", "succeeded", host="h") for i in range(3000)]
    tasks[1999] = _task("worker:1999", "failed", host="h", exit_code=3, seconds=1.0)
    tasks[7] = _task("worker:7", "failed", host="h", signal="SIGABRT", seconds=2.0)
    assert FAILED.first_failure
    first = replace(FAILED.first_failure, task="worker:1999")
    view = replace(FAILED, tasks=tuple(tasks), first_failure=first)
    assert (
        _text(failures.outcome(view))
        == """\
task         host  end               time
worker:1999  h     failed, exit 3   1.0 s  <- first failure
worker:7     h     failed, SIGABRT  2.0 s
worker:[0-6,8-1998,2000-2999]: succeeded
"""
    )


def test_status_names_the_runs_before_and_after() -> None:
    view = _view(follows="digits-1", requeues=22, continued_as="digits-3")
    lines = status.status(view, T)
    assert "continues digits-1 (requeued after the time limit, 22nd time)" in lines
    assert "continued as digits-3" in lines
    preempted = status.status(_view(follows="digits-1"), T)
    assert "continues digits-1" in preempted


# --- status --------------------------------------------------------------------------


def test_status_of_a_run_that_runs() -> None:
    view = _view(
        state=RunState.RUNNING,
        since_s=T + 5,
        hosts=(HostView(host="node2", state="failed", cause="disk\x1b[2J full"),),
        notes=("TF ports are open",),
        tasks=(
            _task("worker:0", "running", host="node1", pid=4711, step=1200,
                  steps_per_s=41.52, wait_share=0.123),
            _task("worker:1", "starting", host="node2", phase="importing tensorflow"),
        ),
    )  # fmt: skip
    assert (
        _text(status.status(view, T + 190))
        == f"""\
{RUN}  running
ssh  began 10:15:00, running for 3 min 05 s
host node2: failed: disk\\x1b[2J full
note: TF ports are open

task      state     host    pid  step  steps/s  waiting
worker:0  running   node1  4711  1200     41.5     12 %
worker:1  starting  node2                                importing tensorflow
"""
    )
    assert status.status_line(view, T + 190) == f"{RUN}  running  began 10:15:00"


def test_status_of_a_run_that_failed() -> None:
    text = _text(status.status(FAILED, T + 400))
    assert text.startswith(f"""\
{RUN}  failed (exit code 1)
ssh  began 10:15:00, ended 10:20:02, took 5 min 02 s

first failure: worker:1 on node2: ValueError: shapes do not match (exit 3)
""")
    assert text.endswith("""\
task      state    host    pid  step  steps/s  waiting  end
chief:0   failed   node1                                exit 1
worker:0  failed   node1                                SIGABRT
worker:1  failed   node2  4712  1200     41.5      2 %  exit 3
ps:0      stopped  node1  4700                          SIGTERM  attempt 1
""")
    assert status.status_line(FAILED, T + 100_000) == (
        f"{RUN}  failed (exit code 1)  began 2026-11-20 10:15:00"
    )


def test_status_of_runs_whose_launcher_is_gone() -> None:
    lost = _view(
        state=RunState.LOST, exit_code=5, reason="the launcher died", since_s=T
    )
    assert status.status(lost, T)[0] == f"{RUN}  lost (exit code 5)"
    assert "reason: the launcher died" in status.status(lost, T)
    unknown = _view(state=RunState.RUNNING, unknown_since_s=T + 60, since_s=T)
    assert status.status(unknown, T + 90) == [
        f"{RUN}  unknown since 10:16:00 (was running)",
        "ssh  began 10:15:00",
    ]
    assert status.status(RunView(run=RUN, name="digits"), T) == [f"{RUN}  starting", ""]


# --- the plan ------------------------------------------------------------------------


def _planned(task: str, rank: int | None, **env: str) -> dict[str, Any]:
    host = f"node{(rank or 0) + 1}"
    kind, _, index = task.partition(":")
    return {
        "task": task,
        "rank": rank,
        "host": host,
        "address": f"{host}:auto",
        "argv": ["python", "train.py", "--name", "two words"],
        "cwd": "/home/a/digits",
        "env": {
            "OMP_NUM_THREADS": "1",
            "WANDB_API_KEY": "<secret from file ~/.wandb>",
            "TFCLUSTER_TASK": task,
            **env,
        },
        "device_filters": ["/job:ps", f"/job:{kind}/task:{index}"]
        if kind != "ps"
        else [],
        "log": f"{LOGS}/{kind}-{index}.log",
    }


PLAN: dict[str, Any] = {
    "name": "digits",
    "backend": "ssh",
    "hosts": [
        {"host": "node1", "slots": 4, "gpus": 2},
        {"host": "node2", "slots": 4, "gpus": 2},
        {"host": "gpu7", "slots": None, "gpus": None},
    ],
    "tasks": [
        _planned("worker:0", 0, CUDA_VISIBLE_DEVICES="0"),
        _planned("worker:1", 1, CUDA_VISIBLE_DEVICES="1"),
        {**_planned("ps:0", None), "argv": ["python", "-m", "ps"], "address": None},
    ],
    "cluster": {"worker": ["node1:auto", "node2:auto"], "ps": ["node1:auto"]},
}


def test_the_plan_says_once_what_is_shared() -> None:
    origins = {"backend": "cluster.yaml:2:10", "tasks.worker": "--set"}
    assert (
        _text(plan.plan(PLAN, origins))
        == """\
digits on ssh: 3 tasks, 3 hosts

hosts
  node[1-2]  2 hosts, each  4 slots  2 GPUs
  gpu7

worker: 2 tasks
  command  python train.py --name 'two words'
  in       /home/a/digits
  env      OMP_NUM_THREADS=1
           WANDB_API_KEY=<secret from file ~/.wandb>
  logs in  /state/runs/x/logs
  worker:0  rank 0  node1  node1:auto  worker-0.log
      env  CUDA_VISIBLE_DEVICES=0
      sees only  /job:ps /job:worker/task:0
  worker:1  rank 1  node2  node2:auto  worker-1.log
      env  CUDA_VISIBLE_DEVICES=1
      sees only  /job:ps /job:worker/task:1

ps: 1 task
  command  python -m ps
  in       /home/a/digits
  env      OMP_NUM_THREADS=1
           WANDB_API_KEY=<secret from file ~/.wandb>
  logs in  /state/runs/x/logs
  ps:0  node1  no port  ps-0.log

cluster in TF_CONFIG
  worker  node1:auto, node2:auto
  ps      node1:auto

where values came from
  backend       cluster.yaml:2:10
  tasks.worker  --set
"""
    )


def test_tasks_of_a_type_may_differ_in_everything() -> None:
    odd = {**PLAN["tasks"][1], "argv": ["x y"], "cwd": "/else", "log": "/logs/1.log"}
    text = _text(plan.plan({**PLAN, "tasks": [PLAN["tasks"][0], odd]}))
    assert f"  worker:0  rank 0  node1  node1:auto  {LOGS}/worker-0.log\n" in text
    assert "      command  'x y'\n      in  /else\n" in text


def test_an_empty_plan() -> None:
    assert plan.plan({"name": "x", "backend": "local", "hosts": [], "tasks": []}) == [
        "x on local: 0 tasks, 0 hosts"
    ]


def test_a_very_large_plan_is_fast_and_says_shared_things_once() -> None:
    tasks = [
        {
            "task": f"worker:{i}",
            "rank": i,
            "host": f"n{i // 3}",
            "address": f"n{i // 3}:auto",
            "argv": ["python", "train.py"],
            "cwd": "/x",
            "env": {**{f"KEY_{j}": "value" for j in range(10)}, "LOCAL": str(i % 3)},
            "device_filters": [],
            "log": f"{LOGS}/worker-{i}.log",
        }
        for i in range(3000)
    ]
    hosts = [{"host": f"n{i}", "slots": 3, "gpus": None} for i in range(1000)]
    cluster = {"worker": [task["address"] for task in tasks]}
    document = {"name": "x", "backend": "ssh", "hosts": hosts, "tasks": tasks}
    began_s = time.process_time()
    lines = plan.plan({**document, "cluster": cluster})
    assert time.process_time() - began_s < allow_s(0.5)
    text = _text(lines)
    assert "  n[0-999]  1000 hosts, each  3 slots\n" in text
    assert "n2:auto, n2:auto, and 2,992 more, one for each task\n" in text
    for once in ("KEY_7=value", "python train.py", LOGS, "  in       /x"):
        assert text.count(once) == 1, once
    assert len(lines) < 6100


# --- nothing hostile gets through ----------------------------------------------------


@pytest.mark.parametrize("evil", HOSTILE)
def test_no_view_lets_anything_through(evil: str) -> None:
    failure = FailureView(
        task=evil,
        host=evil,
        exit_code=1,
        signal=evil,
        cause=evil,
        log_tail=(evil,),
        log=evil,
    )
    task = TaskView(
        task=evil,
        host=evil,
        address=evil,
        signal=evil,
        phase=evil,
        cause=evil,
        log=evil,
        state=TaskState.RUNNING,
    )
    view = RunView(
        run=evil,
        name=evil,
        backend=evil,
        reason=evil,
        first_failure=failure,
        secondary=(failure,),
        hosts=(HostView(host=evil, cause=evil, state=evil),),
        tasks=(task, replace(task, state=TaskState.STARTING)),
        notes=(evil,),
    )
    starting_hosts = replace(view, tasks=(), hosts=(HostView(host=evil),))
    planned = {
        **PLAN["tasks"][0],
        "task": evil,
        "host": evil,
        "address": evil,
        "argv": [evil],
        "cwd": evil,
        "env": {evil: evil},
        "log": evil,
        "device_filters": [evil],
    }
    document = {
        "name": evil,
        "backend": evil,
        "hosts": [{"host": evil}],
        "tasks": [planned],
        "cluster": {evil: [evil]},
    }
    shown = [
        *failures.failure(view),
        *failures.outcome(view),
        *status.status(view, T),
        status.status_line(view, T),
        progress.starting(view, T),
        progress.starting(starting_hosts, T),
        progress.running(view, T),
        progress.stopping(view, T),
        *failures.fold_errors({evil: [evil]}),
        *plan.plan(document, {evil: evil}),
        *plan.plan({**document, "tasks": [planned, {**planned, "argv": ["b"]}]}),
    ]
    for line in shown:
        assert sanitise(line) == line
        assert "\n" not in line
        assert "\t" not in line or "\t" in evil


def test_colours_change_nothing_but_colours() -> None:
    style = Style(colours=True)
    for plain, coloured in (
        (failures.failure(FAILED), failures.failure(FAILED, style)),
        (failures.outcome(FAILED), failures.outcome(FAILED, style)),
        (status.status(FAILED, T), status.status(FAILED, T, style)),
        (plan.plan(PLAN), plan.plan(PLAN, None, style)),
    ):
        assert "\x1b[" in "".join(coloured)
        assert [sanitise(line).rstrip() for line in coloured] == plain


def test_views_show_replayed_runs() -> None:
    view = replay(PLAN, [{"t": T, "type": "run", "run": RUN, "started": T}])
    assert progress.starting(view, T) == (
        "waiting for 3 of 3 hosts: node[1-2],gpu7 not asked yet"
    )
    assert len(status.status(view, T)) == 7


def test_patterns_that_match_nothing_are_said_to() -> None:
    view = ResultsView(host="node1", state="fetched", there="/home/a/digits")
    assert status.result_lines(view) == [
        "results from node1: no file in /home/a/digits matches"
    ]

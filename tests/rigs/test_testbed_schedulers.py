"""The rig's Slurm and Grid Engine run jobs over several hosts."""

from __future__ import annotations

from tests.rigs.testbed import Testbed
from tests.rigs.testbed.commands import RigError, wait_until
from tests.rigs.testbed.sge_texts import SLOTS_PER_NODE

_WAIT_S = 90.0


# Slurm.


def test_srun_runs_on_all_nodes(testbed: Testbed) -> None:
    said = testbed.login.output(("srun", "-N4", "hostname")).split()
    assert sorted(said) == ["node1", "node2", "node3", "node4"]


def test_slurm_hands_out_gpus(testbed: Testbed) -> None:
    argv = ("srun", "-N1", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES")
    assert testbed.login.output(argv) == "0,1\n"


def _batch(rig: Testbed, *options: str, script: str, user: str = "alice") -> str:
    """Submit a batch job; returns its id."""
    done = rig.login.run(
        ("sbatch", "--parsable", *options), user=user, stdin=f"#!/bin/sh\n{script}\n"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _slurm_state(rig: Testbed, job: str) -> str:
    return rig.login.output(
        ("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
    ).strip()


def test_a_batch_job_runs_as_its_user(testbed: Testbed) -> None:
    home = testbed.accounts["alice"].home
    script = 'id -un; echo "$SLURM_JOB_NODELIST"; srun hostname'
    job = _batch(testbed, "-N3", "-o", "batch.txt", script=script)
    wait_until(lambda: _slurm_state(testbed, job) == "COMPLETED", "job", _WAIT_S)
    said = (home / "batch.txt").read_text().split()
    assert said[0] == "alice"
    assert said[1].startswith("node[")
    assert len(said[2:]) == 3


def test_a_job_of_urgent_requeues_one_of_spot(testbed: Testbed) -> None:
    script = 'echo "life $SLURM_RESTART_COUNT"; sleep 300'
    spot = _batch(testbed, "-N4", "--exclusive", "-p", "spot", script=script)
    wait_until(lambda: _slurm_state(testbed, spot) == "RUNNING", "spot", _WAIT_S)
    urgent = _batch(testbed, "-N4", "--exclusive", "-p", "urgent", script="sleep 300")
    wait_until(lambda: _slurm_state(testbed, urgent) == "RUNNING", "urgent", _WAIT_S)
    assert _slurm_state(testbed, spot) == "PENDING"
    testbed.login.output(("scancel", spot, urgent))
    testbed.repair()


def test_a_partition_has_a_time_limit(testbed: Testbed) -> None:
    shown = testbed.login.output(("sinfo", "-h", "-p", "short", "-o", "%l"))
    assert shown == "1:00\n"


# Grid Engine.


def _queued(rig: Testbed, *options: str, script: str) -> str:
    """Submit a job as alice, in her home; returns its id."""
    argv = ("qsub", "-terse", "-cwd", "-j", "y", *options)
    done = rig.login.run(argv, user="alice", stdin=script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def _wait_for_end(rig: Testbed, job: str) -> None:
    """Raises RigError with what Grid Engine knows and has logged if it does not end."""

    def jobs() -> list[str]:
        rows = rig.login.output(("qstat", "-u", "*")).splitlines()[2:]
        return [row.split()[0] for row in rows]

    try:
        wait_until(lambda: job not in jobs(), f"end of job {job}", _WAIT_S, poll_s=0.1)
    except RigError as error:
        shown = rig.login.output(("qstat", "-f", "-u", "*"))
        rig.login.run(("qdel", job))  # It would take the slots of later tests.
        assert rig.sge is not None
        raise RigError(f"{error}\n{shown}\n{rig.sge.messages()}") from error


def _hosts_of(rig: Testbed, environment: str, slots: int) -> dict[str, int]:
    """The hosts and slots that PE_HOSTFILE lists in a job."""
    output = rig.accounts["alice"].home / f"{environment}.txt"
    pe = ("-pe", environment, str(slots))
    job = _queued(rig, *pe, "-o", str(output), script="cat $PE_HOSTFILE")
    _wait_for_end(rig, job)
    rows = (line.split() for line in output.read_text().splitlines())
    return {row[0].removesuffix(".cluster.test"): int(row[1]) for row in rows}


def test_round_robin_spreads_over_all_hosts(testbed: Testbed) -> None:
    hosts = _hosts_of(testbed, "tf", 6)
    assert sorted(hosts) == ["node1", "node2", "node3", "node4"]
    assert sorted(hosts.values()) == [1, 1, 2, 2]


def test_fill_up_takes_a_whole_host_first(testbed: Testbed) -> None:
    assert sorted(_hosts_of(testbed, "tf_fill", 6).values()) == [2, SLOTS_PER_NODE]


def test_a_fixed_rule_takes_as_many_on_each(testbed: Testbed) -> None:
    assert list(_hosts_of(testbed, "tf_2", 4).values()) == [2, 2]


def test_a_job_starts_programs_on_its_other_hosts(testbed: Testbed) -> None:
    output = testbed.accounts["alice"].home / "inherit.txt"
    script = (
        "for host in $(cut -d' ' -f1 $PE_HOSTFILE); do\n"
        "  echo hello | qrsh -inherit $host sh -c 'cat; hostname' &\n"
        "done; wait"
    )
    job = _queued(testbed, "-pe", "tf", "4", "-o", str(output), script=script)
    _wait_for_end(testbed, job)
    said = sorted(output.read_text().split())
    assert said == ["hello"] * 4 + ["node1", "node2", "node3", "node4"]

"""Hostlists, Slurm's variables, and Grid Engine's host file."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets.text import bytes_of, text_of
from tfcluster.base.errors import ConfigError, StartError
from tfcluster.plan import host_patterns
from tfcluster.plan.host_patterns import HostlistError
from tfcluster.schedulers import job_hosts, sge
from tfcluster.schedulers.sge import GPU_VARIABLES
from tfcluster.schedulers.slurm import srun, variables


def _hostlist(data: bytes) -> None:
    text = text_of(data)
    names = host_patterns.expand(text)
    assert len(names) <= 10_000
    if not any(map(host_patterns.host_name_problem, names)):
        folded = host_patterns.fold(names)
        assert host_patterns.expand(folded) == names


def _environment(data: bytes) -> dict[str, str]:
    """``NAME=value`` lines, which cannot have a NUL."""
    pairs = (line.partition("=") for line in text_of(data).split("\n"))
    return {name: value.replace("\0", "") for name, _, value in pairs if name}


def _slurm(data: bytes) -> None:
    environ = _environment(data)
    variables.is_inside(environ)
    srun.has_gpus(environ)
    variables.require_one_launcher(environ)
    for node in variables.nodes(environ):
        assert host_patterns.host_name_problem(node.name) is None


def _hostfile(data: bytes) -> None:
    slots = sge.slots_by_host("file", text_of(data))
    assert all(count > 0 for count in slots.values())
    assert not any(name.startswith("-") for name in slots)


def _sge(data: bytes) -> None:
    environ = _environment(data)
    environ.pop("PE_HOSTFILE", None)
    job_hosts.gpus_given(environ, GPU_VARIABLES)
    sge.granted_slots(environ)


def _gpus(data: bytes) -> None:
    said = text_of(data)
    srun.parse_gpus(said)
    job_hosts.parse_gpus("h1", said, GPU_VARIABLES)


TARGETS = (
    Target(
        "hostlist",
        _hostlist,
        lambda: bytes_of(
            "node[01-04,7]-ib,login", "[::1]", "a1,a2,a3", "r[1-2]n[1-2]c[1-3]", "a"
        ),
        (HostlistError,),
        (b"[", b"]", b"-", b",", b"[1-9]", b"[0-999999999999999999]", b"n[1,"),
    ),
    Target(
        "slurm-variables",
        _slurm,
        lambda: bytes_of(
            "SLURM_JOB_ID=1\nSLURM_JOB_NODELIST=n[1-3]\nSLURM_JOB_NUM_NODES=3\n"
            "SLURM_TASKS_PER_NODE=2(x2),1\nSLURM_GPUS=2",
            "SLURM_JOB_ID=1\nSLURM_HET_SIZE=2\nSLURM_JOB_NODELIST_HET_GROUP_0=a\n"
            "SLURM_JOB_NODELIST_HET_GROUP_1=a,b\nSLURM_TASKS_PER_NODE_HET_GROUP_0=2\n"
            "SLURM_TASKS_PER_NODE_HET_GROUP_1=1(x2)",
            "SLURM_STEP_NUM_TASKS=4\nSLURM_PROCID=0",
        ),
        (ConfigError, StartError),
        (b"(x", b"\nSLURM_", b"_HET_GROUP_0=", b"[1-3]", b"999999999"),
    ),
    Target(
        "pe-hostfile",
        _hostfile,
        lambda: bytes_of(
            "h1 4 all.q@h1 UNDEFINED\nh2.x.y 2 all.q@h2 0,1:0,2\nh1 1 b.q@h1\n"
        ),
        (ConfigError,),
        (b" 4 ", b"\n", b"all.q@h1", b"UNDEFINED"),
        most_bytes=1 << 18,
    ),
    Target(
        "sge-variables",
        _sge,
        lambda: bytes_of(
            "JOB_ID=1\nSGE_TASK_ID=undefined\nPE=tf\nNSLOTS=4",
            "JOB_ID=1\nSGE_TASK_ID=1\nNSLOTS=1\nHOSTNAME=h1\nSGE_HGR_gpu=0 1",
        ),
        (ConfigError, StartError),
    ),
    Target(
        "gpus",
        _gpus,
        lambda: bytes_of(
            "tfcluster-gpus n1 0,1\ntfcluster-gpus n2 unset\ntfcluster-gpus n3 \n",
            "motd\ntfcluster-gpus unset|0 1|unset|unset\n",
            "tfcluster-gpus GPU-12-ab,MIG-3|unset|unset|unset\n",
        ),
        (StartError,),
        (b"tfcluster-gpus ", b"|", b"unset", b"NoDevFiles"),
    ),
)

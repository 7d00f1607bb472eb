"""The scheduler whose only host is this machine: the agent is a child process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfcluster.plan.model import Allocation, Description, Host
from tfcluster.schedulers.base import Scheduler
from tfcluster.schedulers.process_channel import OwnHostStarter

_EXAMPLE = """\
backend: local                   # all tasks on this machine
"""


class LocalScheduler(Scheduler):
    """One host with unlimited slots and this machine's GPUs."""

    name = launcher = "local"
    title = "this machine"
    example = _EXAMPLE
    here = True

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        from tfcluster.agent.gpus import gpus

        del description  # there is only this machine
        host = Host(
            name="localhost",
            address="127.0.0.1",
            gpus=gpus(env),
            cpus=len(os.sched_getaffinity(0)),
        )
        return Allocation(hosts=(host,))

    def starter(
        self, description: Description, env: Mapping[str, str]
    ) -> OwnHostStarter:
        del description, env  # agents inherit our environment
        return OwnHostStarter()

    def expected(self, description: Description) -> Allocation:
        del description
        return Allocation(hosts=(Host(name="localhost", address="127.0.0.1"),))


SCHEDULER = LocalScheduler()

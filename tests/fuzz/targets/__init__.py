"""All targets, by the side that the data comes from."""

from __future__ import annotations

from functools import cache

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    channel,
    configuration,
    hosts,
    parameter_server,
    ranks,
    record,
    requirements,
    schedulers,
    ssh,
    workdir,
)


@cache
def targets() -> dict[str, Target]:
    """The targets by their names."""
    modules = (
        channel,
        ranks,
        parameter_server,
        record,
        hosts,
        ssh,
        schedulers,
        configuration,
        requirements,
        workdir,
    )
    return {target.name: target for module in modules for target in module.TARGETS}

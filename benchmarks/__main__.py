"""Runs all benchmarks, one after another."""

from __future__ import annotations

from benchmarks import (
    between_hosts,
    chatter,
    collective,
    commands,
    fanout,
    first_allreduce,
    input_pipelines,
    overlap,
    parameter_server,
    partition,
    parts,
    planning,
    restart,
    shards,
    startup,
    trace,
    training,
)

for benchmark in (
    startup,
    commands,
    planning,
    restart,
    first_allreduce,
    chatter,
    collective,
    parts,
    trace,
    training,
    input_pipelines,
    partition,
    shards,
    parameter_server,
    between_hosts,
    overlap,
):
    benchmark.main()
fanout.main([])

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
    peers,
    planning,
    restart,
    shards,
    startup,
    trace,
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
    peers,
    input_pipelines,
    partition,
    shards,
    parameter_server,
    between_hosts,
    overlap,
):
    benchmark.main()
fanout.main([])

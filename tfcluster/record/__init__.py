"""The record of runs: what was planned, what happened, and who is still alive.

    paths        where files are, and which run a user means
    files        JSON files that are replaced atomically
    events       the event stream: lines of ``events.jsonl``, their reader and writer
    run_status   RunView: the state of a run as plain data
    replay       plan + events + progress -> RunView (pure)
    liveness     the launcher's lock and identity: is it still alive?
    run_locks    only one active run holds a given name; only dead runs are removed
    continuation a job that starts again continues as another run
    load_run     a run's RunView from its folder
    metrics      what each task did and used over time
    launched     the Description that a run was launched with
    requests     what other commands ask of the launcher
    logs         last lines of log files, and following them

Knows nothing about hosts, channels, colours or commands.
"""

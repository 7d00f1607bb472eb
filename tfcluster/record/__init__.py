"""The record of runs: what was planned, what happened, and who is still alive.

    paths      where things lie, and which run a person means
    files      JSON files that are replaced whole, or not at all
    events     the event stream: lines of ``events.jsonl``
    writer     the launcher's pen: one thread that writes events and progress
    fold       plan + events + progress -> RunView (pure)
    liveness   the launcher's lock and identity; is it still there?
    names      a given name is held by one active run
    reading    a run's RunView from its folder
    logs       last lines of log files, and following them

Knows nothing of hosts, channels, colours or commands.
"""

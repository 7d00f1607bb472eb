"""The runtime in a Python below a task's command, where our ``sitecustomize`` began it.

That may be the one that trains, or one that never will: so it says nothing to the agent
and takes nothing of the task's before it claims the task's rank.
"""

from __future__ import annotations

import atexit
import os
import random
import sys

from tfcluster.runtime.context import Context, context_from
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.scripts.run_script import Program, parse
from tfcluster.runtime.task import bootstrap, injection
from tfcluster.runtime.telemetry.agent_channel import be_silent, reporter
from tfcluster.runtime.telemetry.exit_cause import cause


def begin(*, seed_random: bool) -> None:
    """Stand around the import of TensorFlow or Keras that has just begun.

    ``seed_random``: Python's own generator is as fresh as it was when it was made.
    """
    be_silent()
    context = _context()
    if not context.trains:
        return
    if seed_random:
        random.seed(injection.common_seed(context))
    atexit.register(_report_end)
    bootstrap.surround(_program(), context)


def _context() -> Context:
    try:
        return context_from(os.environ)
    except ContextError as error:
        sys.exit(f"tfcluster: {error}")


def _program() -> Program:
    """What this interpreter runs, as far as that can be known by now."""
    words = list(sys.orig_argv)
    if sys.argv[:1] == ["-c"] and "-c" in words:
        # Flags may be joined with it (-uc), which is rare: then the code is unknown.
        found = parse(words[words.index("-c") :])
        if found is not None:
            return found
    return Program("", sys.argv[0] if sys.argv else "", tuple(sys.argv[1:]))


def _report_end() -> None:
    """Why the program ends, in a sentence; if it has the rank, the agent hears it."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and (sentence := cause(error)):
        reporter().failure(sentence)
    reporter().flush()

"""The runtime in a Python that a task's command starts; ``sitecustomize`` calls it.

This interpreter may or may not be the one that trains. So it reports nothing to the
agent, and takes over no function of the task, before it claims the task's rank.
"""

from __future__ import annotations

import atexit
import sys

from tfcluster.runtime.scripts.run_script import Script, parse
from tfcluster.runtime.task import bootstrap, injection
from tfcluster.runtime.task.generators import seed_generators
from tfcluster.runtime.telemetry.agent_channel import be_silent, reporter
from tfcluster.runtime.telemetry.exit_status import cause


def begin(*, seed_random: bool, seed_numpy: bool, distributes_itself: bool) -> None:
    """Install the runtime, at the beginning of the import of TensorFlow or Keras.

    ``seed_random`` and ``seed_numpy`` say whether to seed Python's and numpy's
    generators, because they have not been used yet. Generators are left alone if the
    program ``distributes_itself``. Raises SystemExit if the environment contradicts
    itself.
    """
    be_silent()
    context = bootstrap.own_context()
    if not context.trains and context.recording is None:
        return
    if not distributes_itself:
        seed = injection.common_seed(context)
        seed_generators(seed, python=seed_random, numpy=seed_numpy)
    atexit.register(_report_end)
    bootstrap.surround(_program(), context)


def _program() -> Script:
    """The program that this interpreter runs, as far as known."""
    words = list(sys.orig_argv)
    if sys.argv[:1] == ["-c"] and "-c" in words:
        # In the rare case of joined flags (-uc) the code is unknown.
        program = parse(words[words.index("-c") :])
        if program is not None:
            return program
    return Script("", sys.argv[0] if sys.argv else "", tuple(sys.argv[1:]))


def _report_end() -> None:
    """Report why the program ends; reaches the agent if this process has the rank."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and (sentence := cause(error)):
        reporter().failure(sentence)
    reporter().flush()

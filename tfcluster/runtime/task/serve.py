"""The built-in server of a ps or data task, or of a worker that another task controls.

It serves until it is stopped, and does not know what its clients do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tfcluster.runtime import tf_server
from tfcluster.runtime.context import Context
from tfcluster.runtime.task import tf_data_service
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.tracer import tracer

if TYPE_CHECKING:
    from tfcluster.runtime.task.ps_task import ParameterService

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(context: Context) -> NoReturn:
    """Run the server of ``context``'s task until SIGTERM, SIGINT or SIGHUP; exit 0.

    Raises ContextError if the environment has no address for it.
    """
    # Block the signals before TensorFlow and numpy start threads, which inherit the
    # mask. So only sigwait gets the signals, whatever the threads do in C++.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    reporter().listen()
    reporter().phase("importing tensorflow")
    if context.task_type == "data":
        producing = tf_data_service.start(context)
        _until_stopped(producing, None, lambda: tf_data_service.clear(context))
    parameters = _parameters(context)
    server = tf_server.start(context) if parameters is None else None
    _until_stopped(server, parameters)


def _parameters(context: Context) -> ParameterService | None:
    """The parameter service, if this task has to run one."""
    if context.task_type != "ps" or not context.parameter_servers:
        return None
    # Not at the top: this imports numpy, which other servers do not need.
    from tfcluster.runtime.task import ps_task

    return ps_task.start(context, reporter())


def _until_stopped(
    server: object,
    parameters: ParameterService | None,
    clear: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Keep the servers alive until a signal asks this task to stop."""
    reporter().phase("serving")
    signal.sigwait(_STOP)
    if parameters is not None:
        parameters.report()
        if (ours := tracer()) is not None:
            ours.finish()
    clear()
    # TensorFlow cannot shut down a server cleanly, so skip all destructors.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

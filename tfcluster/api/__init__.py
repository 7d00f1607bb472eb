"""Launch and watch runs from Python: scripts, services and notebooks.

The launcher of a run is a separate process, as on the command line: it needs the main
thread for its signals, and the run must not depend on what happens in the caller's
process. If the caller's process ends or crashes, the launcher stops the run in order,
unless the run is detached. So nothing here installs a signal handler or keeps global
state.
"""

from tfcluster.api.function_call import run
from tfcluster.api.launching import attach, launch
from tfcluster.api.run_handle import Outcome, Run, RunFailedError
from tfcluster.base.errors import (
    ActiveRunError,
    ConfigError,
    ContactLostError,
    HostError,
    ResourceError,
    StartError,
    TfclusterError,
)

__all__ = [
    "ActiveRunError",
    "ConfigError",
    "ContactLostError",
    "HostError",
    "Outcome",
    "ResourceError",
    "Run",
    "RunFailedError",
    "StartError",
    "TfclusterError",
    "attach",
    "launch",
    "run",
]

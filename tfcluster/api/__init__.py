"""Launch and watch runs from Python: scripts, services and notebooks.

The launcher of a run is a separate process, as on the command line: it needs the main
thread for its signals, and the run must not depend on what happens in the caller's
process. If the caller's process ends or crashes, the launcher stops the run in order,
unless the run is detached. So nothing here installs a signal handler or keeps global
state.
"""

from tfcluster.api.function_call import run as run
from tfcluster.api.launching import attach as attach
from tfcluster.api.launching import launch as launch
from tfcluster.api.run_handle import Outcome as Outcome
from tfcluster.api.run_handle import Run as Run
from tfcluster.api.run_handle import RunFailedError as RunFailedError
from tfcluster.base.errors import ActiveRunError as ActiveRunError
from tfcluster.base.errors import ConfigError as ConfigError
from tfcluster.base.errors import ContactLostError as ContactLostError
from tfcluster.base.errors import HostError as HostError
from tfcluster.base.errors import ResourceError as ResourceError
from tfcluster.base.errors import StartError as StartError
from tfcluster.base.errors import TfclusterError as TfclusterError

"""Every attribute of TensorFlow 1 (``tf.compat.v1``) that the runtime replaces.

TensorFlow is not imported here.
"""

from __future__ import annotations

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.contract import Patch, Table

_TRAIN = "tensorflow.compat.v1.train"
_SESSIONS = ("tensorflow.compat.v1.Session", "tensorflow.compat.v1.InteractiveSession")

DEVICE_SETTER = Patch(
    _TRAIN, "replica_device_setter", "variables on the ps tasks of the run", "function"
)
MONITORED_SESSION = Patch(
    _TRAIN, "MonitoredTrainingSession", "sessions on the run's servers", "function"
)
SESSION_INIT, INTERACTIVE_INIT = (
    Patch(session, "__init__", "device filters and time limits")
    for session in _SESSIONS
)
SESSION_RUN, INTERACTIVE_RUN = (
    Patch(session, "run", "order of exchanges, errors that name the missing task")
    for session in _SESSIONS
)
SESSION_CLOSE, INTERACTIVE_CLOSE = (
    Patch(session, "close", "exit after a ps task is lost") for session in _SESSIONS
)
SUPERVISOR_INIT = Patch(f"{_TRAIN}.Supervisor", "__init__", "the chief of the run")
SYNC_HOOK = Patch(
    f"{_TRAIN}.SyncReplicasOptimizer",
    "make_session_run_hook",
    "the chief of the run, exit of its workers",
)
CONNECT_TO_CLUSTER = Patch(
    "tensorflow.compat.v1.config",
    "experimental_connect_to_cluster",
    "servers of ps tasks, which start on request",
    "function",
)
SERVER_INIT = Patch(f"{_TRAIN}.Server", "__init__", "the one server of a task")
SERVER_JOIN = Patch(f"{_TRAIN}.Server", "join", "exit of serving tasks")
PREPARE_SESSION = Patch(
    f"{_TRAIN}.SessionManager",
    "prepare_session",
    "comparison of graphs, restarted tasks",
)
WAIT_FOR_SESSION = Patch(
    f"{_TRAIN}.SessionManager", "wait_for_session", "limit on waiting for the chief"
)

OPTIMIZER_APPLY = Patch(
    f"{_TRAIN}.Optimizer",
    "apply_gradients",
    "recorded steps, a warning that a graph is not distributed",
)
SYNC_APPLY = Patch(
    f"{_TRAIN}.SyncReplicasOptimizer",
    "apply_gradients",
    "how recorded steps of workers combine",
)
_RANDOM = "equal random numbers in compared runs"
GRAPH_AS_DEFAULT = Patch("tensorflow.compat.v1.Graph", "as_default", _RANDOM)
NEW_DEFAULT_GRAPHS = tuple(
    Patch("tensorflow.compat.v1", name, _RANDOM, "function")
    for name in (
        "disable_eager_execution",
        "disable_v2_behavior",
        "reset_default_graph",
    )
)
CLIPS = tuple(
    Patch("tensorflow.compat.v1", name, "the line of a clip in a report", "function")
    for name in ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
)

PATCHES = (
    *(patch for patch in list(vars().values()) if isinstance(patch, Patch)),
    *NEW_DEFAULT_GRAPHS,
    *CLIPS,
)
TABLE = Table(PATCHES, lambda: False)


def check() -> None:
    """Raise one CollectiveError that names all that TensorFlow 1 lacks."""
    contract.check([*tf_internals.NAMES_OF_TF1, *PATCHES])

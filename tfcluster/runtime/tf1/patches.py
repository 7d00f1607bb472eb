"""Every attribute of TensorFlow 1 (``tf.compat.v1``) that the runtime replaces.

``python -m tfcluster.runtime.tf1.patches`` prints the table. TensorFlow is not imported
here. An attribute's handlers are called in the order of the table.
"""

from __future__ import annotations

import sys

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.contract import Handler, How, Patch, Table

_SCRIPT = "scripts of TensorFlow 1"
_MANAGED = "compared graphs"
_VERIFY = "tfcluster verify"
_RECORD = "tf1.step_recorder.StepRecorder"
_TRAIN = "tensorflow.compat.v1.train"
_SESSIONS = ("tensorflow.compat.v1.Session", "tensorflow.compat.v1.InteractiveSession")


def _patch(
    target: str, attribute: str, function: str, why: str, how: How = "attribute"
) -> Patch:
    handler = Handler(f"tf1.script_hooks.ScriptHooks.{function}", _SCRIPT, True)
    return Patch(target, attribute, (handler,), why, how)


DEVICE_SETTER = _patch(
    _TRAIN,
    "replica_device_setter",
    "device_setter",
    "variables on the ps tasks of the run",
    "function",
)
MONITORED_SESSION = Patch(
    _TRAIN,
    "MonitoredTrainingSession",
    (
        Handler(f"{_RECORD}._monitored", _VERIFY, True),
        Handler("tf1.script_hooks.ScriptHooks.monitored", _SCRIPT, True),
    ),
    "sessions on the run's servers",
    "function",
)
SESSION_INIT, INTERACTIVE_INIT = (
    _patch(session, "__init__", "begin_session", "device filters and time limits")
    for session in _SESSIONS
)
SESSION_RUN, INTERACTIVE_RUN = (
    Patch(
        session,
        "run",
        (
            Handler(f"{_RECORD}._run", _VERIFY, True),
            Handler("exchange.pending_ops._run", "exchanges in graphs", True),
            Handler("tf1.script_hooks.ScriptHooks.run", _SCRIPT, True),
        ),
        "order of exchanges, errors that name the missing task",
    )
    for session in _SESSIONS
)
SESSION_CLOSE, INTERACTIVE_CLOSE = (
    _patch(session, "close", "close", "exit after a ps task is lost")
    for session in _SESSIONS
)
SUPERVISOR_INIT = _patch(
    f"{_TRAIN}.Supervisor", "__init__", "supervisor", "the chief of the run"
)
SYNC_HOOK = _patch(
    f"{_TRAIN}.SyncReplicasOptimizer",
    "make_session_run_hook",
    "sync_hook",
    "the chief of the run, exit of its workers",
)
CONNECT_TO_CLUSTER = _patch(
    "tensorflow.compat.v1.config",
    "experimental_connect_to_cluster",
    "connect",
    "servers of ps tasks, which start on request",
    "function",
)
SERVER_INIT = Patch(
    f"{_TRAIN}.Server",
    "__init__",
    (Handler("tf1.shared_server.SharedServer.create", _SCRIPT, True),),
    "the one server of a task",
)
SERVER_JOIN = Patch(
    f"{_TRAIN}.Server",
    "join",
    (Handler("tf1.shared_server.SharedServer.join", _SCRIPT, True),),
    "exit of serving tasks",
)
PREPARE_SESSION = Patch(
    f"{_TRAIN}.SessionManager",
    "prepare_session",
    (Handler("tf1.session_manager._prepare", _MANAGED, True),),
    "comparison of graphs, restarted tasks",
)
WAIT_FOR_SESSION = Patch(
    f"{_TRAIN}.SessionManager",
    "wait_for_session",
    (Handler("tf1.session_manager._wait", _MANAGED, True),),
    "limit on waiting for the chief",
)

OPTIMIZER_APPLY = Patch(
    f"{_TRAIN}.Optimizer",
    "apply_gradients",
    (
        Handler(f"{_RECORD}._apply", _VERIFY, True),
        Handler(
            "tf1.undivided_graphs.UndividedGraphs._apply", "several ranks, no ps", True
        ),
    ),
    "recorded steps, a warning that a graph is not distributed",
)
SYNC_APPLY = Patch(
    f"{_TRAIN}.SyncReplicasOptimizer",
    "apply_gradients",
    (Handler(f"{_RECORD}._sync_apply", _VERIFY, True),),
    "how recorded steps of workers combine",
)
_RANDOM = "equal random numbers in compared runs"
GRAPH_AS_DEFAULT = Patch(
    "tensorflow.compat.v1.Graph",
    "as_default",
    (Handler(f"{_RECORD}._as_default", _VERIFY, True),),
    _RANDOM,
)
NEW_DEFAULT_GRAPHS = tuple(
    Patch(
        "tensorflow.compat.v1",
        name,
        (Handler(f"{_RECORD}._new_default_graph", _VERIFY, True),),
        _RANDOM,
        "function",
    )
    for name in (
        "disable_eager_execution",
        "disable_v2_behavior",
        "reset_default_graph",
    )
)
CLIPS = tuple(
    Patch(
        "tensorflow.compat.v1",
        name,
        (Handler(f"{_RECORD}._clip", _VERIFY, True),),
        "the line of a clip in a report",
        "function",
    )
    for name in ("clip_by_global_norm", "clip_by_norm", "clip_by_value")
)

PATCHES = (
    *(each for each in list(vars().values()) if isinstance(each, Patch)),
    *NEW_DEFAULT_GRAPHS,
    *CLIPS,
)
TABLE = Table(PATCHES, lambda: False)


def check() -> None:
    """Raise one CollectiveError that names all that TensorFlow 1 lacks."""
    contract.check([*tf_internals.NAMES_OF_TF1, *PATCHES])


if __name__ == "__main__":
    sys.stdout.write(TABLE.text())

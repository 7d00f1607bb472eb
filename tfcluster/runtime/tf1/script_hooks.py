"""Hooks that give the run's cluster to a TensorFlow 1 script written for a cluster.

Everything that the script specifies is kept. The hooks add what it omits: the cluster
and this task's device for ``replica_device_setter``, a running server, whether the task
is the chief, device filters. Sessions wait for late tasks, and errors name lost tasks.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.errors import (
    CollectiveTimeoutError,
    NotDistributedError,
)
from tfcluster.runtime.parameter_server.server_socket import request_server
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.agent_channel import Reporter, reporter
from tfcluster.runtime.telemetry.rank_claim import claim
from tfcluster.runtime.tensor_types import Graph, Operation
from tfcluster.runtime.tf1 import patches, session_manager
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.graph_builder import ByBytes
from tfcluster.runtime.tf1.ps_reachability import PsReachability
from tfcluster.runtime.tf1.shared_server import SharedServer
from tfcluster.runtime.tf1_types import (
    ConfigProto,
    Coordinator,
    SessionRunContext,
    SessionRunHook,
    V1Session,
)

tf1 = tf.compat.v1

DeviceSetter: TypeAlias = Callable[[Operation], str]

_EXCHANGES = "tfcluster_exchanges"
_TIMEOUT_MS = "tfcluster_timeout_ms"
_GRACE_POSITION = 5
"""The position of ``stop_grace_period_secs`` after ``hooks``."""


def install(context: Context) -> None:
    """Install the hooks in this process. They open no port before the script does.

    Raises CollectiveError if TensorFlow lacks something that the hooks need.
    """
    patches.check()
    hooks = ScriptHooks(context)
    hooks.server.install()
    patches.TABLE.install(
        {
            patches.DEVICE_SETTER: hooks.device_setter,
            patches.MONITORED_SESSION: hooks.monitored,
            patches.SESSION_INIT: hooks.begin_session,
            patches.INTERACTIVE_INIT: hooks.begin_session,
            patches.SESSION_RUN: hooks.run,
            patches.INTERACTIVE_RUN: hooks.run,
            patches.SESSION_CLOSE: hooks.close,
            patches.INTERACTIVE_CLOSE: hooks.close,
            patches.SUPERVISOR_INIT: hooks.supervisor,
            patches.SYNC_HOOK: hooks.sync_hook,
            patches.CONNECT_TO_CLUSTER: hooks.connect,
        },
        HandlerPlace.LAST,
        always=True,
    )


@dataclass
class ScriptHooks:
    """Wraps the functions that a script calls, and adds what the script omits."""

    context: Context
    server: SharedServer = field(init=False)
    workers: Workers = field(init=False)
    reachability: PsReachability = field(init=False)
    placed: weakref.WeakKeyDictionary[Graph, ByBytes] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """One entry per graph, however many device setters it has."""
    synchronised: bool = False
    """Whether the script has a SyncReplicasOptimizer."""

    def __post_init__(self) -> None:
        context = self.context
        self.server = SharedServer(context)
        ask = self._request_server if context.parameter_servers else None
        self.reachability = PsReachability(context.cluster, ask)
        self.workers = Workers(
            dict(context.cluster),
            context.task_type,
            context.task_index,
            context.attempt,
        )

    def device_setter(
        self,
        original: Callable[..., DeviceSetter | None],
        ps_tasks: int = 0,
        ps_device: str = "/job:ps",
        worker_device: str = "/job:worker",
        merge_devices: bool = True,  # TensorFlow's own
        cluster: object = None,
        ps_ops: Sequence[str] | None = None,
        ps_strategy: Callable[[Operation], int] | None = None,
    ) -> DeviceSetter | None:
        """Call ``replica_device_setter`` with this run's cluster and balanced bytes."""
        if cluster is None and not ps_tasks:
            jobs = self.context.cluster.items()
            cluster = tf1.train.ClusterSpec({job: list(at) for job, at in jobs})
        if worker_device == "/job:worker":
            worker_device = self.workers.device
        if ps_strategy is None:
            ps_strategy = self._balance()
        return original(
            ps_tasks,
            ps_device,
            worker_device,
            merge_devices,
            cluster,
            ps_ops,
            ps_strategy,
        )

    def monitored(
        self,
        original: Callable[..., V1Session],
        master: str = "",
        is_chief: bool | None = None,  # TensorFlow's own signature
        checkpoint_dir: str | None = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> V1Session:
        """Create a ``MonitoredTrainingSession`` on this task's server."""
        master = master or self.server.start().target
        if not self.server.is_target(master):
            chief = True if is_chief is None else is_chief
            return original(
                master, chief, checkpoint_dir, scaffold, hooks, *args, **kwargs
            )
        self._require_distributed()
        if self.context.options.synchronous and self.workers.is_chief:
            self._warn(
                "runtime.synchronous is for Keras: a graph of TensorFlow 1 waits "
                "for all gradients with SyncReplicasOptimizer"
            )
        session_manager.guard(self.workers)
        if self.synchronised and len(args) <= _GRACE_POSITION:
            kwargs.setdefault("stop_grace_period_secs", STOP_GRACE_S)
        return original(
            master,
            self._is_chief(is_chief),
            checkpoint_dir if self.workers.is_chief else None,
            scaffold,
            [*(hooks or ()), StepCounterHook(reporter())],
            *args,
            **kwargs,
        )

    def begin_session(
        self,
        original: Callable[..., None],
        session: V1Session,
        target: str = "",
        graph: Graph | None = None,
        config: ConfigProto | None = None,
    ) -> None:
        """Call ``Session.__init__``; a session on our server first waits for the ps."""
        if target and self.server.is_target(target):
            claim(self.context.task)
            program_kind.claim_tf1_script()
            self.reachability.require()
            self._warn_of_imbalance(graph or tf1.get_default_graph())
            config = self._config(config)
            contract.mark(session, _EXCHANGES, True)
            contract.mark(session, _TIMEOUT_MS, config.operation_timeout_in_ms)
        elif target.removeprefix("grpc://") in self.context.cluster.get("ps", ()):
            self.reachability.require()
        original(session, target, graph, config)

    def run(
        self,
        original: Callable[..., Any],
        session: V1Session,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call ``Session.run``; raise CollectiveTimeoutError after a stall."""
        try:
            result = original(session, *args, **kwargs)
            self._note_exchange(session)
            return result
        except tf.errors.DeadlineExceededError as error:
            timeout_ms = getattr(session, _TIMEOUT_MS, 0)
            if not timeout_ms:
                raise
            raise CollectiveTimeoutError(
                f"{self.context.task} has waited {timeout_ms / 1000:g} s in one "
                "session.run: it is waiting for another task, for example at a "
                "barrier; the limit is runtime.stall_timeout"
            ) from error

    def close(self, original: Callable[..., None], session: V1Session) -> None:
        """Call ``Session.close``, but do not wait for lost parameter servers."""
        on_cluster = hasattr(session, _TIMEOUT_MS)
        if on_cluster and not sys.is_finalizing() and self.reachability.lost():
            # TensorFlow would wait forever for the lost server.
            return
        original(session)

    def sync_hook(
        self,
        original: Callable[..., SessionRunHook],
        optimizer: tf_internals.SyncReplicasOptimizer,
        is_chief: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> SessionRunHook:
        """Call ``SyncReplicasOptimizer.make_session_run_hook`` with the run's chief."""
        chief = self._is_chief(is_chief)
        self.synchronised = True
        inner = original(optimizer, chief, *args, **kwargs)
        return SyncReplicasHook(optimizer, inner, is_chief=chief)

    def supervisor(
        self, original: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Call ``Supervisor.__init__`` with the run's chief."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        is_chief = bound.arguments.get("is_chief")
        bound.arguments["is_chief"] = self._is_chief(is_chief)
        graph = bound.arguments.get("graph") or tf1.get_default_graph()
        with graph.as_default():
            session_manager.guard(self.workers)
        # Only now, because the original function finalises the graph.
        original(*bound.args, **bound.kwargs)

    def connect(
        self, original: Callable[..., object], *args: Any, **kwargs: Any
    ) -> object:
        """Call ``experimental_connect_to_cluster`` once the servers listen."""
        self.reachability.require()
        return original(*args, **kwargs)

    def _request_server(self, index: int) -> bool:
        context = self.context
        assert context.rank_info is not None  # See ``has_tf1_cluster``.
        return request_server(
            context.parameter_servers,
            index,
            rank=context.rank_info.rank,
            size=context.rank_info.size,
            token=context.token,
        )

    def _note_exchange(self, session: V1Session) -> None:
        """Report that a session on our servers ran a graph with variables on a ps."""
        if getattr(session, _EXCHANGES, False):
            variables = session.graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES)
            if any("/job:ps" in variable.device for variable in variables):
                contract.mark(session, _EXCHANGES, False)
                reporter().exchanged()

    def _balance(self) -> ByBytes:
        graph = tf1.get_default_graph()
        if graph not in self.placed:
            self.placed[graph] = ByBytes(self.workers.num_ps)
        return self.placed[graph]

    def _config(self, config: ConfigProto | None) -> ConfigProto:
        options = self.server.config(config)
        timeout_s = self.context.options.stall_timeout_s
        if timeout_s is not None and not options.operation_timeout_in_ms:
            options.operation_timeout_in_ms = int(timeout_s * 1000)
        return options

    def _is_chief(self, wanted: bool | None) -> bool:
        """Whether this is the chief, whatever the script says; a run needs a chief."""
        if wanted is not None and bool(wanted) != self.workers.is_chief:
            self._warn(
                f"the script treats {self.context.task} as "
                f"{'the chief' if wanted else 'no chief'}, but the chief of this "
                f"run is {self.workers.tasks[0]}; tfcluster uses the latter"
            )
        return self.workers.is_chief

    def _require_distributed(self) -> None:
        variables = tf1.trainable_variables()
        if variables and not any("/job:ps" in v.device for v in variables):
            raise NotDistributedError(
                "the script was not distributed: none of its variables is on a "
                "parameter server. Build the graph within "
                "tf.compat.v1.device(tf.compat.v1.train.replica_device_setter())"
            )

    def _warn_of_imbalance(self, graph: Graph) -> None:
        balance = self.placed.pop(graph, None)
        if balance and balance.warning and self.workers.is_chief:
            self._warn(balance.warning)

    def _warn(self, text: str) -> None:
        reporter().warning(text)
        if self.workers.is_chief:
            sys.stderr.write(f"tfcluster: warning: {text}\n")


_WINDOW_S = 1.0


class StepCounterHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Counts each ``run`` as a step, since the session's purpose is to train."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter
        self._steps = 0
        self._window = (time.monotonic(), 0)
        self._rate = 0.0

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        self._steps += 1
        now = time.monotonic()
        began, steps = self._window
        if now - began >= _WINDOW_S or self._steps == 1:
            self._rate = (self._steps - steps) / max(now - began, 1e-9)
            self._window = (now, self._steps)
        self._reporter.step(self._steps, self._rate, 0.0)

    def end(self, session: V1Session) -> None:
        self._reporter.flush()


STOP_GRACE_S = 2
"""Seconds to wait for the chief session's threads, which do not end; default: 120."""


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """The optimizer's own hook; also ends workers that wait for a token in vain.

    TensorFlow's own hook leaves the workers without a token for their next step. On the
    chief, it leaves a thread that waits for their gradients.

    When the chief ends, it closes the token queue. Taking from it then raises
    OutOfRangeError, which ends a managed session.
    """

    def __init__(
        self,
        optimizer: tf_internals.SyncReplicasOptimizer,
        hook: SessionRunHook,
        *,
        is_chief: bool,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._hook = hook
        self._is_chief = is_chief
        self._close: Operation | None = None

    def begin(self) -> None:
        self._hook.begin()
        if self._is_chief:
            self._close = tf_internals.token_queue(self._optimizer).close()

    def after_create_session(self, session: V1Session, coord: Coordinator) -> None:
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: SessionRunContext) -> object:
        return self._hook.before_run(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        self._hook.after_run(run_context, run_values)

    def end(self, session: V1Session) -> None:
        self._hook.end(session)
        if self._close is not None:
            session.run(self._close)

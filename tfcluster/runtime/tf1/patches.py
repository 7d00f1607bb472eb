"""Put a cluster around a script of TensorFlow 1 that is written for one.

What the script says itself counts; what it leaves out it gets: the cluster and this
task's device for ``replica_device_setter``, a running server, whether it is the chief,
device filters. Who comes late is waited for, who is gone is named.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import (
    CollectiveTimeoutError,
    NotDistributedError,
)
from tfcluster.runtime.scripts import tf1_script
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.rank_claim import claim
from tfcluster.runtime.tf1 import session_manager
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.placement import ByBytes
from tfcluster.runtime.tf1.ps_reachability import PsReachability
from tfcluster.runtime.tf1.shared_server import SharedServer
from tfcluster.runtime.tf1.step_counter_hook import StepCounterHook
from tfcluster.runtime.tf1.sync_replicas_hook import STOP_GRACE_S, SyncReplicasHook

tf1 = tf.compat.v1

_GRACE_AT = 5
"""Where ``stop_grace_period_secs`` stands behind ``hooks``."""


def install(context: Context) -> None:
    """Do so for the rest of this process. Opens nothing before the script does."""
    around = _Around(context)
    around.server.install()
    _replace("replica_device_setter", around.device_setter)
    _replace("MonitoredTrainingSession", around.monitored)
    for kind in (tf1.Session, tf1.InteractiveSession):
        kind.__init__ = around.session(kind.__init__)
        kind.run = around.run(kind.run)
        kind.close = around.close(kind.close)
    supervisor = tf1.train.Supervisor
    supervisor.__init__ = around.supervisor(supervisor.__init__)
    optimizer = tf1.train.SyncReplicasOptimizer
    optimizer.make_session_run_hook = around.sync_hook(optimizer.make_session_run_hook)


@dataclass
class _Around:
    context: Context
    server: SharedServer = field(init=False)
    workers: Workers = field(init=False)
    reach: PsReachability = field(init=False)
    placed: weakref.WeakKeyDictionary[Any, ByBytes] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """One for each graph, however many device setters it has."""
    synchronised: bool = False
    """The script has a SyncReplicasOptimizer."""

    def __post_init__(self) -> None:
        context = self.context
        self.server = SharedServer(context)
        self.reach = PsReachability(context.cluster)
        self.workers = Workers(
            dict(context.cluster),
            context.task_type,
            context.task_index,
            context.attempt,
        )

    def device_setter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setter(
            ps_tasks: int = 0,
            ps_device: str = "/job:ps",
            worker_device: str = "/job:worker",
            merge_devices: bool = True,  # TensorFlow's own
            cluster: Any = None,
            ps_ops: Any = None,
            ps_strategy: Any = None,
        ) -> Any:
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

        return setter

    def monitored(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def session(
            master: str = "",
            is_chief: bool | None = None,  # TensorFlow's own signature
            checkpoint_dir: Any = None,
            scaffold: Any = None,
            hooks: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            master = master or self.server.start().target
            if not self.server.is_target(master):
                chief = True if is_chief is None else is_chief
                return original(
                    master, chief, checkpoint_dir, scaffold, hooks, *args, **kwargs
                )
            self._require_distributed()
            if self.context.options.synchronous and self.workers.is_chief:
                self._say(
                    "runtime.synchronous is for Keras: a graph of TensorFlow 1 waits "
                    "for all gradients with SyncReplicasOptimizer"
                )
            session_manager.guard(self.workers)
            if self.synchronised and len(args) <= _GRACE_AT:
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

        return session

    def session(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def begin(
            session: Any, target: str = "", graph: Any = None, config: Any = None
        ) -> None:
            if target and self.server.is_target(target):
                claim(self.context.task)
                tf1_script.claim()
                self.reach.require()
                self._warn_of_weights(graph or tf1.get_default_graph())
                config = self._config(config)
                session.tfcluster_exchanges = True
                session.tfcluster_timeout_ms = config.operation_timeout_in_ms
            original(session, target, graph, config)

        return begin

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(session: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(session, *args, **kwargs)
                self._note_exchange(session)
                return result
            except tf.errors.DeadlineExceededError as error:
                timeout_ms = getattr(session, "tfcluster_timeout_ms", 0)
                if not timeout_ms:
                    raise
                raise CollectiveTimeoutError(
                    f"{self.context.task} has waited {timeout_ms / 1000:g} s in one "
                    "session.run: another task did not do what it waits for, such as "
                    "come to a barrier (runtime.stall_timeout is how long it waits)"
                ) from error

        return run

    def close(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def close(session: Any) -> None:
            on_cluster = hasattr(session, "tfcluster_timeout_ms")
            if on_cluster and not sys.is_finalizing() and self.reach.lost():
                # TensorFlow would wait without end for the server that is gone.
                return
            original(session)

        return close

    def sync_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hook(optimizer: Any, is_chief: Any = None, *args: Any, **kw: Any) -> Any:
            chief = self._is_chief(is_chief)
            self.synchronised = True
            inner = original(optimizer, chief, *args, **kw)
            return SyncReplicasHook(optimizer, inner, is_chief=chief)

        return hook

    def supervisor(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def begin(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            said = bound.arguments.get("is_chief")
            bound.arguments["is_chief"] = self._is_chief(said)
            graph = bound.arguments.get("graph") or tf1.get_default_graph()
            with graph.as_default():
                session_manager.guard(self.workers)
            # It is the last that may add to the graph.
            original(*bound.args, **bound.kwargs)

        return begin

    def _note_exchange(self, session: Any) -> None:
        """A session on our servers has run a graph that has variables on a ps."""
        if getattr(session, "tfcluster_exchanges", False):
            variables = session.graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES)
            if any("/job:ps" in variable.device for variable in variables):
                session.tfcluster_exchanges = False
                reporter().exchanged()

    def _balance(self) -> ByBytes:
        graph = tf1.get_default_graph()
        if graph not in self.placed:
            self.placed[graph] = ByBytes(self.workers.num_ps)
        return self.placed[graph]

    def _config(self, config: Any) -> Any:
        made = self.server.config(config)
        timeout_s = self.context.options.stall_timeout_s
        if timeout_s is not None and not made.operation_timeout_in_ms:
            made.operation_timeout_in_ms = int(timeout_s * 1000)
        return made

    def _is_chief(self, said: Any) -> bool:
        """Two chiefs would initialise twice, and none never."""
        if said is not None and bool(said) != self.workers.is_chief:
            self._say(
                f"the script takes {self.context.task} for "
                f"{'the chief' if said else 'no chief'}; the chief of this run is "
                f"{self.workers.tasks[0]}, and that counts"
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

    def _warn_of_weights(self, graph: Any) -> None:
        balance = self.placed.pop(graph, None)
        if balance and balance.warning and self.workers.is_chief:
            self._say(balance.warning)

    def _say(self, text: str) -> None:
        reporter().warning(text)
        if self.workers.is_chief:
            sys.stderr.write(f"tfcluster: warning: {text}\n")


def _replace(
    name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put ``around`` a function of ``tf.compat.v1.train``, by all of its names."""
    original = getattr(tf1.train, name)
    replacement = around(original)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("tensorflow") and (
            vars(module).get(name) is original if hasattr(module, "__dict__") else False
        ):
            setattr(module, name, replacement)

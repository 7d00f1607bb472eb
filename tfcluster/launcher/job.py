"""A run as planned before anything starts: tasks, roles, identity. Frozen.

Also predicts from a program's source whether it will import TensorFlow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from tfcluster import schedulers
from tfcluster.base.isolated_import import HOOK_FOLDER
from tfcluster.base.light_dataclasses import dataclass, field, replace
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import RECORDING
from tfcluster.launcher.agent_connection import (
    Answered,
    Closed,
    Opened,
    Received,
    Unopened,
)
from tfcluster.launcher.workdir_listing import Listing
from tfcluster.lifecycle.events import Interrupted
from tfcluster.lifecycle.state import Plan, Role
from tfcluster.plan.compose import (
    PARAMETER_SERVICE,
    TENSORFLOW,
    Choice,
    Program,
    TaskSpec,
    address,
    chosen_transport,
    compose,
    place_specs,
)
from tfcluster.plan.model import Allocation, Description, Host, Interpreter, Strategy
from tfcluster.plan.placement import Place, place_again, place_anew, share_machines
from tfcluster.schedulers.base import BatchScheduler

DISPATCHER = TaskId("data", 0)
"""The data task that runs the tf.data service's dispatcher."""

# restart.scope -> whether a failed task restarts alone. "auto" is not in it: workers
# that train independently restart alone, ranks that train in step all restart.
_ALONE = {"task": True, "job": False}

Item = Received | Closed | Opened | Unopened | Answered | Interrupted
"""What the launcher's queue holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that is fixed for one run."""

    run: str
    description: Description
    allocation: Allocation
    specs: Mapping[TaskId, TaskSpec]
    """In listing order."""
    secrets: Mapping[str, str]
    token: str
    """256 random bits in hex, by which the ranks' sockets authenticate each other."""
    logs: Path
    files: Listing | None = None
    """The workdir's files, if they are copied to hosts that do not share them."""
    left_out: Mapping[TaskId, TaskSpec] = field(default_factory=dict)
    """The tasks that the run continues without, as they were before."""
    pythons: Mapping[str, Interpreter] = field(default_factory=dict)
    """Host -> the interpreter there, if the host's preparation has changed it."""

    def on_host(self, host: Host) -> tuple[TaskSpec, ...]:
        return tuple(s for s in self.specs.values() if s.place.host.name == host.name)

    def with_python(self, host: str, python: Interpreter) -> Job:
        specs = {
            task: replace(spec, place=_prepared(spec.place, python))
            if spec.place.host.name == host
            else spec
            for task, spec in self.specs.items()
        }
        return replace(self, specs=specs, pythons={**self.pythons, host: python})

    def _at(self, description: Description, places: Sequence[Place]) -> Job:
        prepared = [_prepared(p, self.pythons.get(p.host.name)) for p in places]
        specs = place_specs(description.runtime, self.specs.values(), prepared)
        by_task = {spec.task: spec for spec in specs}
        return replace(self, description=description, specs=by_task)

    def log(self, task: TaskId) -> str:
        return str(self.logs / task.log_name)

    @property
    def witness(self) -> Path:
        """A file that exists before any agent starts, only on our file system."""
        return self.logs.with_name("plan.json")

    def ranks(self) -> dict[int, TaskId]:
        return {
            spec.place.rank: task
            for task, spec in self.specs.items()
            if spec.place.rank is not None
        }

    def used_hosts(self) -> tuple[Host, ...]:
        """The hosts that have a task, in the allocation's order."""
        used = {spec.place.host.name for spec in self.specs.values()}
        return tuple(host for host in self.allocation.hosts if host.name in used)

    def located(self, hosts: Mapping[str, Host]) -> Job:
        """The job with what its hosts reported. Raises StartError without GPUs."""
        before = [spec.place for spec in self.specs.values()]
        places = [replace(place, host=hosts[place.host.name]) for place in before]
        more_gpus = self.allocation.more_gpus
        placed = share_machines(self.description, places, more_gpus)
        reported = tuple(hosts[host.name] for host in self.allocation.hosts)
        located = replace(self, allocation=replace(self.allocation, hosts=reported))
        return located._at(self.description, placed)

    def plan(self) -> Plan:
        """What the lifecycle needs to know about this run."""
        description = self.description
        scheduler = schedulers.get(description.backend)
        runtime = description.runtime
        asynchronous = (
            runtime.strategy is Strategy.PARAMETER_SERVER and not runtime.synchronous
        )
        alone = _ALONE.get(description.restart.scope, asynchronous)
        data = [task for task in self.specs if task.type == DISPATCHER.type]
        return Plan(
            tasks={task: spec.place.host.name for task, spec in self.specs.items()},
            roles={task: role_of(spec) for task, spec in self.specs.items()},
            grace_s=description.grace_s,
            start_timeout_s=description.start_timeout_s,
            max_restarts=description.restart.max,
            restart_within_s=description.restart.within_s,
            backoff_s=description.restart.backoff_s,
            restart_alone=alone,
            keepers=frozenset(t for t in self.specs if t.type == "ps" and asynchronous),
            apart=frozenset(data),
            spare=frozenset(data) - {DISPATCHER},
            min_training=self._min_training(),
            listeners=frozenset(t for t, s in self.specs.items() if is_awaited(s)),
            must_exchange=frozenset(self._exchanging()),
            results=description.results is not None and not scheduler.here,
            hurried=isinstance(scheduler, BatchScheduler),
            requeues=description.restart.requeues,
        )

    def _exchanging(self) -> Iterator[TaskId]:
        """Training tasks that are expected to exchange something with other tasks."""
        runtime = self.description.runtime
        together = [task for task, s in self.specs.items() if s.trains]
        if runtime.require_exchange and (
            len(together) > 1 or runtime.strategy in PARAMETER_SERVICE
        ):
            yield from together

    def _min_training(self) -> int | None:
        tasks = self.description.tasks
        least = tasks["worker"].min if "worker" in tasks else None
        return None if least is None else least + ("chief" in tasks)

    def on_fewer(self, hosts: Container[str]) -> Job:
        """The job on the remaining ``hosts``. Raises StartError if GPUs are missing."""
        places = [spec.place for spec in self.specs.values()]
        return self._placed_anew(*place_again(self.description, places, hosts))

    def _placed_anew(self, description: Description, places: Sequence[Place]) -> Job:
        changed = self._at(description, places)
        everything = {**self.left_out, **self.specs}
        left_out = {t: s for t, s in everything.items() if t not in changed.specs}
        return replace(changed, left_out=left_out)

    @property
    def transport(self) -> Choice:
        """The transport between the ranks, as far as we know it."""
        places = [spec.place for spec in self.specs.values()]
        return chosen_transport(self.description.runtime, places)

    def resized(self, hosts: Sequence[Host], workers: int) -> Job:
        """The job with so many workers on ``hosts``. Raises StartError."""
        used = {spec.place.host.name: spec.place.host for spec in self.specs.values()}
        by_name = {host.name: used.get(host.name, host) for host in hosts}
        places = [spec.place for spec in self.specs.values()]
        changed = self._placed_anew(
            *place_anew(self.description, places, [*by_name.values()], workers)
        )
        before = [by_name.pop(h.name, h) for h in self.allocation.hosts]
        allocation = replace(self.allocation, hosts=(*before, *by_name.values()))
        return replace(changed, allocation=allocation)

    def data_service(self, ports: Mapping[TaskId, int]) -> str | None:
        """The URL of the tf.data service's dispatcher; None without data tasks."""
        dispatcher = self.specs.get(DISPATCHER)
        if dispatcher is None:
            return None
        return f"grpc://{address(dispatcher.place, ports.get(DISPATCHER))}"

    def data_tasks(self) -> str | None:
        count = sum(task.type == DISPATCHER.type for task in self.specs)
        return str(count) if count else None

    def parameter_servers(self, ports: Mapping[TaskId, int]) -> str | None:
        """Addresses of our parameter services, in order of ps tasks; None: none."""
        addresses = [
            address(spec.place, ports.get(task))
            for task, spec in self.specs.items()
            if spec.serves_parameters
        ]
        return ",".join(addresses) or None

    def runs_tensorflow_server(self, task: TaskId) -> bool:
        """Whether a TensorFlow server listens on the task's port, as far as we know."""
        spec = self.specs[task]
        transport = self.description.runtime.transport
        theirs = spec.strategy is Strategy.NONE or transport == TENSORFLOW
        if spec.server:
            # The server is started later, with a warning, if a program needs it.
            return not spec.serves_parameters
        return spec.needs_port and (theirs or spec.has_own_gpu)

    def may_listen(self, task: TaskId) -> bool:
        """Whether the script may itself listen on its port: it only gets TF_CONFIG."""
        spec = self.specs[task]
        return spec.strategy is Strategy.NONE and spec.needs_port and not spec.server


def _prepared(place: Place, python: Interpreter | None) -> Place:
    return replace(place, host=replace(place.host, prepared_python=python))


def task_specs(
    description: Description, places: Sequence[Place]
) -> tuple[TaskSpec, ...]:
    """The TaskSpec of every task, in listing order; reads programs in the workdir."""
    workdir = description.workdir
    return compose(description, places, lambda p: uses_tensorflow(p, workdir))


def role_of(spec: TaskSpec) -> Role:
    if spec.task.type == "evaluator":
        return Role.EVALUATOR
    return Role.SERVER if spec.server else Role.TRAINING


def is_awaited(spec: TaskSpec) -> bool:
    """Whether it counts as started once it listens (not a data worker: any port)."""
    return spec.server and (spec.task.type != "data" or spec.task == DISPATCHER)


def search_paths(job: Job, package: str) -> dict[str, str]:
    """The folder to prepend to each search path, so that tasks find the runtime."""
    recorded = RECORDING in job.description.env
    if job.description.runtime.strategy is Strategy.NONE and not recorded:
        return {}
    return {"PYTHONPATH": f"{package}/{HOOK_FOLDER}"}


def warm_env(job: Job, spec: TaskSpec) -> dict[str, str | None]:
    """The variables that all tasks of one warm interpreter have in common."""
    return {
        **spec.shared_env,
        **job.secrets,
        "TFCLUSTER_RUN": job.run,
        "TFCLUSTER_TOKEN": job.token,
    }


class CurrentJob:
    """Everybody asks it for the job; only the launcher's loop changes it."""

    def __init__(self, job: Job) -> None:
        self.job = self.planned = job
        """``planned`` is the job after the resize that is being prepared, if any."""
        self.plan = job.plan()
        self.owners: set[tuple[TaskId, str]] = set()
        """All tasks and the hosts that they are on, or once were on."""
        self._note_owners()

    def adopt(self, job: Job) -> None:
        self.job = self.planned = job
        self.plan = job.plan()
        self._note_owners()

    def set_python(self, host: str, python: Interpreter) -> None:
        same = self.planned is self.job
        self.job = self.job.with_python(host, python)
        self.planned = self.job if same else self.planned.with_python(host, python)

    def _note_owners(self) -> None:
        self.owners |= {(t, s.place.host.name) for t, s in self.job.specs.items()}


_MENTION = re.compile(rb"\b(tensorflow|keras|tfcluster)\b")
# A module that only launches runs mentions tfcluster, too.
_MENTION_IN_MODULE = re.compile(
    rb"\b(tensorflow|keras|tfcluster(\.| import )runtime)\b"
)
_MAX_FILES = 200
_MAX_BYTES = 4 << 20


def uses_tensorflow(program: Program, workdir: Path) -> bool:
    """Whether the program or a module beside it mentions TensorFlow, or is not here."""
    _, kind, *rest = program.arguments
    if kind == "-c":
        return bool(_MENTION.search(rest[0].encode(errors="replace")))
    if kind == "-m":
        return True
    script = workdir / kind
    return script.is_dir() or _mentions(script, _MENTION)


def module_uses_tensorflow(file: Path) -> bool:
    return _mentions(file, _MENTION_IN_MODULE)


def _mentions(script: Path, mention: re.Pattern[bytes]) -> bool:
    """Search the script and the modules that it imports from its own folder."""
    folder = script.parent
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop()
        try:
            source = path.read_bytes()
        except OSError:
            return path == script
        if len(source) > _MAX_BYTES or mention.search(source):
            return True
        new = set(_imported_beside(source, folder)) - seen
        seen |= new
        waiting += new
        if len(seen) > _MAX_FILES:
            return True
    return False


def _imported_beside(source: bytes, folder: Path) -> list[Path]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    places = [folder.joinpath(*name.split(".")) for name in sorted(names)]
    files = [p.with_suffix(".py") for p in places] + [p / "__init__.py" for p in places]
    return [path for path in files if path.is_file()]

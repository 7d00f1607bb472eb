"""Rules about combinations of keys in cluster.yaml.

Works on checked values; rules about a section with invalid values are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster import schedulers
from tfcluster.base.vocabulary import BUILT_IN_SERVERS, RANKED_TYPES, TASK_TYPES
from tfcluster.config.diagnostics import Findings
from tfcluster.config.models import ClusterSection, TaskSection
from tfcluster.config.overrides import SECRET
from tfcluster.config.tree import Path
from tfcluster.plan.model import Description, Strategy
from tfcluster.schedulers.base import BatchScheduler, Requeuing
from tfcluster.schedulers.options import Mistake
from tfcluster.schedulers.script import option_mistakes

_NEEDS_PS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
_WITHOUT_PS = (Strategy.COLLECTIVE, Strategy.LOCAL_SGD)


def groups(cluster: ClusterSection) -> dict[str, TaskSection]:
    """The task types that are present, in listing order."""
    every = {kind: getattr(cluster.tasks, kind) for kind in TASK_TYPES}
    return {kind: task for kind, task in every.items() if task is not None}


def strategy(cluster: ClusterSection) -> Strategy:
    if cluster.runtime.strategy is not None:
        return Strategy(cluster.runtime.strategy)
    has_ps = cluster.tasks.ps is not None
    return Strategy.PARAMETER_SERVER if has_ps else Strategy.COLLECTIVE


def check_rules(cluster: ClusterSection, findings: Findings) -> None:
    if findings.sound("tasks"):
        if not any(kind in groups(cluster) for kind in RANKED_TYPES):
            message = "needs at least one worker or chief"
            findings.error(("tasks",), message, "tasks: {worker: 2}")
        if findings.sound("command"):
            _check_commands(cluster, findings)
    _check_tasks(cluster, findings)
    if findings.sound("tasks", "runtime"):
        _check_strategy(cluster, findings)
        _check_runtime(cluster, findings)
        _check_error_feedback(cluster, findings)
        _check_shards(cluster, findings)
        _check_divided_variables(cluster, findings)
    if findings.sound("tasks", "runtime", "restart"):
        _check_min(cluster, findings)
        _check_restart(cluster, findings)
    if findings.sound("restart", "backend"):
        _check_requeue(cluster, findings)
    if findings.sound("env", "secrets"):
        _check_secrets(cluster, findings)
    sound = findings.sound("backend", "hosts") and not cluster.hosts
    if sound and schedulers.get(cluster.backend).lists_hosts:
        path = ("hosts",) if findings.is_written("hosts") else ("backend",)
        message = f"backend {cluster.backend} needs 'hosts'"
        findings.error(path, message, "hosts: [node1, node2]")


def check_unused(cluster: ClusterSection, findings: Findings) -> None:
    """Warn about settings of a valid configuration that have no effect."""
    if cluster.hosts and not findings.is_written("backend"):
        message = "'hosts' is not used: without 'backend' all tasks run here"
        findings.warn(("hosts",), message, "backend: ssh; or backend: local")


def _check_tasks(cluster: ClusterSection, findings: Findings) -> None:
    tasks = groups(cluster)
    if "chief" in tasks and tasks["chief"].count > 1:
        message = f"only one chief is possible; found {tasks['chief'].count}"
        findings.error(("tasks", "chief", "count"), message, "the others are workers")
    for kind, task in tasks.items():
        path = ("tasks", kind)
        if kind in BUILT_IN_SERVERS:
            if task.command is not None:
                message = f"{kind} tasks run a built-in server, not a command"
                findings.error((*path, "command"), message)
            if task.gpus:
                message = f"{kind} tasks take no GPU"
                findings.error((*path, "gpus"), message)
        if task.server and kind not in RANKED_TYPES:
            message = f"'server' is for chief and worker, not for {kind}"
            findings.error((*path, "server"), message)
        elif task.server and task.command is not None:
            message = "a server runs no command"
            findings.error((*path, "command"), message, "remove it, or server: true")


def _check_min(cluster: ClusterSection, findings: Findings) -> None:
    for kind, task in groups(cluster).items():
        if task.min is None:
            continue
        path = ("tasks", kind, "min")
        chosen = strategy(cluster)
        if kind != "worker":
            findings.error(path, f"'min' is for worker, not for {kind}")
        elif task.min > task.count:
            findings.error(path, f"min is {task.min}, but there are {task.count}")
        elif chosen != Strategy.COLLECTIVE:
            message = f"'min' is for strategy collective, not for {chosen}"
            findings.error(path, message)
        elif not cluster.restart.max:
            message = "'min' has no effect without restarts"
            findings.error(path, message, "restart: {max: 3}")


def _check_commands(cluster: ClusterSection, findings: Findings) -> None:
    if cluster.command is not None:
        return
    without = [
        kind
        for kind, task in groups(cluster).items()
        if kind not in BUILT_IN_SERVERS and not task.server and task.command is None
    ]
    if without:
        message = f"missing 'command': {' and '.join(without)} tasks have none to run"
        findings.error(("command",), message, "command: python train.py")


def _check_strategy(cluster: ClusterSection, findings: Findings) -> None:
    chosen = strategy(cluster)
    has_ps = cluster.tasks.ps is not None
    if has_ps and chosen in _WITHOUT_PS:
        message = f"ps tasks are not used under {chosen}"
        hint = "remove them, or set strategy: parameter_server"
        findings.error(("tasks", "ps"), message, hint)
    if not has_ps and chosen in _NEEDS_PS:
        message = f"strategy {chosen} needs ps tasks"
        findings.error(("runtime", "strategy"), message, "tasks: {ps: 1, ...}")


def _check_runtime(cluster: ClusterSection, findings: Findings) -> None:
    runtime, chosen = cluster.runtime, strategy(cluster)
    if runtime.sync_every is not None and runtime.sync_seconds is not None:
        message = "'sync_every' and 'sync_seconds' are both set; choose one"
        findings.error(("runtime", "sync_seconds"), message)
    for key, only_under in (
        ("sync_every", Strategy.LOCAL_SGD),
        ("sync_seconds", Strategy.LOCAL_SGD),
        ("synchronous", Strategy.PARAMETER_SERVER),
    ):
        if getattr(runtime, key) and chosen is not only_under:
            message = f"{key!r} has no effect under {chosen}: it is for {only_under}"
            findings.warn(("runtime", key), message)
    if runtime.trace.enabled and chosen is Strategy.NONE:
        message = f"'trace' records no steps under {chosen}"
        findings.warn(("runtime", "trace"), message)
    if runtime.compression != "none" and chosen is Strategy.LOCAL_SGD:
        message = "'compression' has no effect under local_sgd: weights are sent as is"
        findings.warn(("runtime", "compression"), message)
    elif runtime.compression != "none" and chosen in _NEEDS_PS:
        message = f"'compression' has no effect under {chosen}: it is for collective"
        findings.warn(("runtime", "compression"), message)


def _check_error_feedback(cluster: ClusterSection, findings: Findings) -> None:
    runtime, chosen = cluster.runtime, strategy(cluster)
    if not runtime.error_feedback:
        return
    path = ("runtime", "error_feedback")
    if chosen is not Strategy.COLLECTIVE:
        message = f"'error_feedback' is for strategy collective, not for {chosen}"
        findings.error(path, message)
    elif runtime.compression == "none":
        message = "'error_feedback' needs 'compression': nothing is rounded without it"
        findings.error(path, message, "compression: bf16")
    elif runtime.transport not in ("auto", "host"):
        message = f"'error_feedback' needs transport host, not {runtime.transport}"
        findings.error(path, message, "transport: host")


def _check_shards(cluster: ClusterSection, findings: Findings) -> None:
    runtime, chosen, path = cluster.runtime, strategy(cluster), ("runtime", "shards")
    if runtime.shards is None:
        return
    if chosen is not Strategy.COLLECTIVE:
        message = f"'shards' is for strategy collective, not for {chosen}"
        findings.error(path, message)
    for key, value in (
        ("batch", "global"),
        ("data", "shared"),
        ("compression", "none"),
    ):
        if getattr(runtime, key) != value:
            message = (
                f"'shards' needs {key}: {value}; with {getattr(runtime, key)} the "
                "result depends on the number of ranks"
            )
            findings.error(("runtime", key), message)
    if runtime.transport == "tensorflow":
        message = (
            "'shards' is not for transport tensorflow, which adds in another order"
        )
        findings.error(("runtime", "transport"), message, "transport: auto")
    ranks = sum(
        task.count for kind, task in groups(cluster).items() if kind in RANKED_TYPES
    )
    if ranks > runtime.shards:
        message = f"{runtime.shards} shards are too few for {ranks} ranks"
        findings.error(path, message, "a rank needs at least one shard")


def _check_divided_variables(cluster: ClusterSection, findings: Findings) -> None:
    runtime, chosen = cluster.runtime, strategy(cluster)
    for key, is_set in (
        ("shard_optimizer", runtime.shard_optimizer),
        ("shard_tables", runtime.shard_tables is not None),
    ):
        if is_set and chosen is not Strategy.COLLECTIVE:
            message = f"{key!r} is for strategy collective, not for {chosen}"
            findings.error(("runtime", key), message)
        if is_set and runtime.shards is not None:
            message = (
                f"{key!r} is not for 'shards', which must give the same bits on any "
                "number of ranks"
            )
            findings.error(("runtime", key), message, "remove one of the two")
    if runtime.shard_tables is None:
        return
    for key, value in (("batch", "global"), ("data", "shared")):
        if getattr(runtime, key) != value:
            message = (
                f"'shard_tables' needs {key}: {value}: ranks look up rows together"
            )
            findings.error(("runtime", key), message)


def _check_restart(cluster: ClusterSection, findings: Findings) -> None:
    chosen = strategy(cluster)
    waits = chosen in (*_WITHOUT_PS, Strategy.REPLICATED)
    words = str(chosen)
    if chosen is Strategy.PARAMETER_SERVER and cluster.runtime.synchronous:
        waits, words = True, f"{chosen} with 'synchronous'"
    if cluster.restart.scope == "task" and waits:
        message = f"under {words} a single task cannot rejoin the others"
        findings.error(("restart", "scope"), message, "scope: auto restarts all")
    for key, is_set in (
        ("within", cluster.restart.within is not None),
        ("backoff", bool(cluster.restart.backoff)),
    ):
        if is_set and not cluster.restart.max:
            message = f"{key!r} has no effect without 'max'"
            findings.error(("restart", key), message, "restart: {max: 3}")


def _check_requeue(cluster: ClusterSection, findings: Findings) -> None:
    if cluster.restart.on_time_limit != "requeue":
        return
    path, scheduler = ("restart", "on_time_limit"), schedulers.get(cluster.backend)
    if not isinstance(scheduler, Requeuing):
        message = (
            f"'requeue' is not for backend {scheduler.name}: {scheduler.why_no_requeue}"
        )
        hint = "remove it"
        if isinstance(scheduler, BatchScheduler):
            hint = "launch again while the exit code is 124: docs/how-to/resume.md"
        findings.error(path, message, hint)
    elif not cluster.restart.max:
        message = "'requeue' needs 'max': a requeued job counts as a restart"
        findings.error(path, message, "restart: {max: 10, on_time_limit: requeue}")


def _check_secrets(cluster: ClusterSection, findings: Findings) -> None:
    for name, source in cluster.secrets.items():
        path = ("secrets", name)
        if (source.file is None) == (source.env is None):
            message = f"secret {name} needs either 'file' or 'env'"
            findings.error(path, message, f"{name}: {{file: ~/.{name.lower()}}}")
        if name in cluster.env:
            findings.error(path, f"{name} is set under 'env:' too", "keep one of them")
    places: list[tuple[Path, Mapping[str, str]]] = [(("env",), cluster.env)]
    if findings.sound("tasks"):
        places += [
            (("tasks", kind, "env"), task.env) for kind, task in groups(cluster).items()
        ]
    for where, env in places:
        for name in filter(SECRET.fullmatch, env):
            findings.warn(
                (*where, name),
                f"{name} looks like a secret, and values under 'env:' are shown",
                "put it under 'secrets:' ({file: ...} or {env: NAME})",
            )


def check_sections(description: Description, findings: Findings) -> None:
    """Check the options in all sections, and the own section against the tasks."""
    for name in description.sections:
        for mistake in option_mistakes(schedulers.get(name), description):
            _note(mistake, findings)
    if findings.sound("tasks", "backend", description.backend):
        scheduler = schedulers.get(description.backend)
        settings = scheduler.settings_in(description)
        for mistake in scheduler.mistakes(description, settings):
            _note(mistake, findings)


def _note(mistake: Mistake, findings: Findings) -> None:
    message = mistake.message
    if mistake.other is not None:
        message += f" ({findings.mark(_path(mistake.other, findings))})"
    note = findings.error if mistake.fatal else findings.warn
    note(_path(mistake.key, findings), message, mistake.hint)


def _path(key: str, findings: Findings) -> Path:
    words = key.split(".")
    if words[-1].isdecimal():
        return findings.item(tuple(words[:-1]), int(words[-1]))
    return tuple(words)

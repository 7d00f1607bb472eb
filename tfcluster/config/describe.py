"""Turns checked values into the Description that the rest of tfcluster works on.

Expands references, splits commands, makes paths absolute, and fills in defaults.
Problems go to the findings; if there are errors, the Description is unusable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from tfcluster import schedulers
from tfcluster.base.errors import ConfigError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.config import files
from tfcluster.config.commands import (
    CommandError,
    name_problem,
    split_command,
    wrapper_problem,
)
from tfcluster.config.diagnostics import Findings, Report
from tfcluster.config.hosts import listed_hosts
from tfcluster.config.models import ClusterSection, SecretSource, TaskSection
from tfcluster.config.requirements import Bundle, RequirementsError, bundle
from tfcluster.config.rules import groups, strategy
from tfcluster.config.tree import FillError, Scalar, fill, find, origins
from tfcluster.config.tree import Path as Keys
from tfcluster.plan import model
from tfcluster.plan.model import pattern_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    environ: Mapping[str, str]
    folder: Path
    """An absolute path, to which relative paths are relative."""
    stem: str
    """The run's name if none is given."""
    python: str
    """The interpreter if none is given."""
    arguments: tuple[str, ...] = ()


class Describer:
    """Makes the Description of a cluster; problems go to ``findings``."""

    def __init__(
        self, cluster: ClusterSection, findings: Findings, setting: Setting
    ) -> None:
        self._cluster = cluster
        self._findings = findings
        self._setting = setting

    def description(self) -> model.Description:
        cluster, setting, workdir = self._cluster, self._setting, self._workdir()
        return model.Description(
            name=cluster.name or setting.stem,
            named=cluster.name is not None,
            backend=cluster.backend,
            command=self._command(("command",), cluster.command) or (),
            workdir=workdir,
            sync=self._sync(),
            results=self._results(),
            python=self._python(("python",), cluster.python) or (setting.python,),
            setup=self._setup(),
            requirements=self._requirements(workdir),
            env=self._env(("env",), cluster.env),
            secrets={
                name: self._secret(name, source)
                for name, source in cluster.secrets.items()
            },
            tasks={
                kind: self._group(("tasks", kind), task)
                for kind, task in groups(cluster).items()
            },
            runtime=self._runtime(),
            hosts=self._hosts(),
            ssh=self._ssh(),
            sections=self._sections(),
            spread=cluster.spread,
            launcher=cluster.launcher,
            ports=cluster.ports.range,
            expose=cluster.ports.expose,
            restart=self._restart(),
            on_end=self._on_end(),
            start_timeout_s=cluster.start_timeout,
            progress_timeout_s=cluster.progress_timeout,
            grace_s=cluster.grace,
            source=self._findings.report.source,
            origins=origins(self._findings.root),
        )

    def _runtime(self) -> model.Runtime:
        keys = dict(vars(self._cluster.runtime))
        keys["strategy"] = strategy(self._cluster)
        keys["chief_only"] = tuple(keys["chief_only"])
        keys["stall_warning_s"] = keys.pop("stall_warning")
        keys["stall_timeout_s"] = keys.pop("stall_timeout")
        traced = keys.pop("trace")
        keys["trace"], keys["trace_steps"] = traced.enabled, traced.steps
        return model.Runtime(**keys)

    def _restart(self) -> model.Restart:
        keys = dict(vars(self._cluster.restart))
        keys["within_s"] = keys.pop("within")
        keys["backoff_s"] = keys.pop("backoff")
        return model.Restart(**keys)

    def _fill(self, keys: Keys, text: str, *, keep_bare: bool = False) -> str:
        try:
            return fill(text, self._setting.environ, keep_bare=keep_bare)
        except FillError as error:
            node = find(self._findings.root, keys).node
            mark = node.mark
            if isinstance(node, Scalar) and error.reference in node.raw:
                mark = node.at(node.raw.index(error.reference))
            self._findings.report.error(mark, error.message, error.hint)
            return text

    def _command(self, keys: Keys, words: list[str] | None) -> tuple[str, ...] | None:
        """The argv, followed by arguments from the command line."""
        filled = self._words(keys, words)
        return None if filled is None else (*filled, *self._setting.arguments)

    def _on_end(self) -> tuple[str, ...]:
        words = self._words(("on_end",), self._cluster.on_end) or ()
        if not words or "/" not in words[0]:
            return words
        program = self._path(("on_end",), words[0])
        return words if program is None else (str(program), *words[1:])

    def _words(self, keys: Keys, words: list[str] | None) -> tuple[str, ...] | None:
        if words is None:
            return None
        node = find(self._findings.root, keys).node
        if not isinstance(node, Scalar):
            filled = [
                self._fill(self._findings.item(keys, index), word, keep_bare=True)
                for index, word in enumerate(words)
            ]
        else:
            filled = self._split(keys, node)
        if filled and not filled[0]:
            self._findings.error(keys, "the command is empty")
        return tuple(filled)

    def _split(self, keys: Keys, node: Scalar) -> list[str]:
        try:
            words = split_command(node.raw)
        except CommandError as error:
            mark = node.at(error.offset)
            self._findings.report.error(mark, error.message, error.hint)
            return []
        # Expanded after splitting, so that a value with spaces stays one argument.
        return [self._fill(keys, word, keep_bare=True) for word in words]

    def _path(self, keys: Keys, text: str | None) -> Path | None:
        if text is None:
            return None
        setting, filled = self._setting, self._fill(keys, text)
        try:
            return files.absolute(filled, setting.folder, setting.environ)
        except files.PathError as error:
            self._findings.error(keys, str(error))
            return None

    def _python(
        self, keys: Keys, python: model.Interpreter | None
    ) -> model.Interpreter | None:
        """A name (looked up on hosts), a path, or a command, whose paths stay."""
        if python is None:
            return None
        if len(python) > 1:
            words = tuple(self._fill(keys, word) for word in python)
            if problem := wrapper_problem(words):
                self._findings.error(keys, *problem)
            return words
        (name,) = python
        if problem := name_problem(name):
            self._findings.error(keys, *problem)
        if "/" not in name and not name.startswith("~"):
            return (self._fill(keys, name),)
        path = self._path(keys, name)
        return None if path is None else (str(path),)

    def _workdir(self) -> Path:
        keys: Keys = ("workdir", "path")
        workdir = self._cluster.workdir
        path = self._path(keys, workdir.path)
        if path is None:
            return self._setting.folder
        scheduler = schedulers.get(self._cluster.backend)
        local = scheduler.here and self._findings.sound("backend")
        here = local or workdir.sync is not None
        if here and (problem := files.folder_problem(path)):
            self._findings.error(keys, problem)
        return path

    def _setup(self) -> model.Setup | None:
        keys, setup = ("setup",), self._cluster.setup
        if setup is None:
            return None
        if isinstance(setup, list):
            lines = [line for text in setup for line in text.rstrip("\n").split("\n")]
            return model.Setup(lines=tuple(lines))
        path, text = self._path(keys, setup), ""
        if path is not None:
            text = self._text_of(keys, path, 'for lines: ["module load cuda"]')
        lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        return model.Setup(lines=tuple(lines), file=setup)

    def _requirements(self, workdir: Path) -> model.Requirements | None:
        requirements = self._cluster.requirements
        if requirements is None:
            return None
        keys: Keys = ("requirements", "file")
        path, read = self._path(keys, requirements.file), partial(self._text_of, keys)
        files_of = Bundle()
        try:
            if path is not None:
                files_of = bundle(path, workdir, read, files.exists)
        except RequirementsError as error:
            self._findings.error(keys, f"{requirements.file}: {error}")
        return model.Requirements(
            file=requirements.file,
            files=tuple(files_of.files),
            local=tuple(dict.fromkeys(files_of.local)),
            editable=tuple(dict.fromkeys(files_of.editable)),
            system_site_packages=requirements.system_site_packages,
        )

    def _text_of(self, keys: Keys, path: Path, hint: str | None = None) -> str:
        if not files.exists(path):
            self._findings.error(keys, f"{str(path)!r} does not exist", hint)
            return ""
        report, text = Report(str(path)), ""
        with contextlib.suppress(ConfigError):
            text = files.read_file(str(path), report)
        for problem in report.errors():
            where = f"{problem.where}: {problem.message}"
            self._findings.error(keys, where, problem.hint)
        return text

    def _sync(self) -> model.Sync | None:
        workdir = self._cluster.workdir
        if workdir.sync is None:
            if workdir.exclude:
                message = "'exclude' is for 'sync', which is not set"
                self._findings.error(("workdir", "exclude"), message)
            return None
        # '~' is not expanded: it means the home on each host.
        folder = self._fill(("workdir", "sync"), workdir.sync).removesuffix("/")
        bare = folder.removeprefix("~/")
        parts = PurePosixPath(bare).parts
        if not parts or parts == ("/",) or ".." in parts or bare.startswith("~"):
            self._findings.error(
                ("workdir", "sync"),
                f"{workdir.sync!r} is not a separate folder on the hosts",
                "for example ~/digits",
            )
        elif not bare.startswith("/"):
            folder = f"~/{bare}"
        return model.Sync(folder=folder, exclude=tuple(workdir.exclude))

    def _results(self) -> model.Results | None:
        results, keys = self._cluster.workdir.results, ("workdir", "results")
        if results is None:
            return None
        for pattern in results.patterns:
            if problem := pattern_problem(pattern):
                hint = 'for example ["*.keras", "logs/"]'
                self._findings.error(keys, f"{pattern!r} {problem}", hint)
        if not results.patterns:
            self._findings.error(keys, "there is no pattern")
        return model.Results(tuple(results.patterns), results.all)

    def _env(self, keys: Keys, env: Mapping[str, str]) -> dict[str, str]:
        return {name: self._fill((*keys, name), text) for name, text in env.items()}

    def _secret(self, name: str, source: SecretSource) -> model.Secret:
        keys: Keys = ("secrets", name)
        if source.env is not None and source.env not in self._setting.environ:
            # A name that does not look like a variable may be the secret itself.
            variable = f"${source.env}" if source.env.isupper() else "its variable"
            self._findings.error((*keys, "env"), f"{variable} is not set here")
        path = self._path((*keys, "file"), source.file)
        if path is not None:
            if problem := files.secret_problem(path):
                self._findings.error((*keys, "file"), *problem)
            elif not files.exists(path):
                # Text that does not look like a path may be the secret itself.
                shown = repr(str(path)) if "/" in (source.file or "") else "its file"
                self._findings.warn((*keys, "file"), f"{shown} does not exist here")
        return model.Secret(file=path, env=source.env)

    def _group(self, keys: Keys, task: TaskSection) -> model.TaskGroup:
        return model.TaskGroup(
            count=task.count,
            gpus=task.gpus,
            env=self._env((*keys, "env"), task.env),
            command=self._command((*keys, "command"), task.command),
            server=task.server,
            min=task.min,
        )

    def _hosts(self) -> tuple[model.Host, ...]:
        hosts = listed_hosts(self._cluster.hosts, self._findings)
        if all(host.python is None for host in hosts):
            return hosts
        return tuple(
            replace(host, python=self._python(("hosts",), host.python))
            for host in hosts
        )

    def _ssh(self) -> model.Ssh:
        ssh = self._cluster.ssh
        paths = {
            key: self._path(("ssh", key), getattr(ssh, key))
            for key in ("identity_file", "config_file", "known_hosts")
        }
        if schedulers.get(self._cluster.backend).lists_hosts:
            for key, path in paths.items():
                if path is not None and not files.exists(path):
                    self._findings.error(("ssh", key), f"{str(path)!r} does not exist")
        return model.Ssh(
            user=ssh.user, port=ssh.port, connect_timeout_s=ssh.connect_timeout, **paths
        )

    def _sections(self) -> dict[str, dict[str, Any]]:
        written = filter(self._findings.is_written, type(self._cluster).keys)
        added = [name for name in written if name not in ClusterSection.keys]
        return {name: dict(vars(getattr(self._cluster, name))) for name in added}


def check_ports(description: model.Description, findings: Findings) -> None:
    """Check that the port range is large enough, if we know that before placement."""
    if description.ports is None:
        return
    size = len(description.ports)
    tasks = sum(1 for task in description.task_ids() if task.type != "evaluator")
    slots = [host.slots for host in description.hosts]
    scheduler = schedulers.get(description.backend)
    if scheduler.here:
        where, room = "this host", size
    elif scheduler.lists_hosts and slots:
        where = "1 host" if len(slots) == 1 else f"{len(slots)} hosts"
        room = sum(size if count is None else min(size, count) for count in slots)
        if None not in slots and sum(filter(None, slots)) < tasks:
            return  # There are too few slots, too, which placement reports.
    else:
        return
    if room < tasks:
        ports = "1 port" if size == 1 else f"{size} ports"
        message = f"range has {ports}, {tasks} tasks on {where} need more"
        findings.error(("ports", "range"), message, "or ports: auto")

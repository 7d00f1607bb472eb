"""What launches ask and say about interpreters that are kept on hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfcluster.compose import WARM, TaskSpec, warm_specs
from tfcluster.host_patterns import fold
from tfcluster.import_variables import is_import_variable
from tfcluster.isolated_import import HOOK_FOLDER, module_argv
from tfcluster.launcher.job import Job, search_paths, warm_env
from tfcluster.model import Host

KEPT = "tfcluster.runtime.warm.kept"

_BACKENDS = ("local", "ssh")
"""A scheduler's hosts are prepared only inside a job, and end with it."""


def hints(job: Job, host: Host) -> list[dict[str, Any]]:
    """The warm interpreters that a host will be asked for, before we know the host.

    An empty word in a command stands for the folder of the package, and folders are
    relative to it. Interpreters below a wrapper, such as a container, are never kept.
    """
    description = job.description
    if description.backend not in _BACKENDS:
        return []
    specs = job.on_host(host)
    return [
        {
            "argv": list(module_argv(warm.python, WARM, root="")),
            "env": import_env(warm_env(job, by_key(specs)[warm.key])),
            "prepend": dict.fromkeys(search_paths(job, ""), HOOK_FOLDER),
            "sure": not description.prepares_hosts,
        }
        for warm in warm_specs(specs)
        if len(warm.python) == 1
    ]


def keep_requests(
    job: Job, host: Host, package: str, *, keep_s: float, purpose: str
) -> list[dict[str, Any]]:
    """The requests for an agent to keep what launches of this job need.

    ``package`` is the folder of the package on that host. Secrets are left out: tasks
    get them after the fork.
    """
    specs = job.on_host(host)
    return [
        {
            "type": "keep",
            "key": warm.key,
            "argv": list(module_argv(warm.python, KEPT, root=package)),
            "env": import_env(warm_env(job, by_key(specs)[warm.key])),
            "prepend": search_paths(job, package),
            "keep_s": keep_s,
            "purpose": purpose,
            "strategy": str(job.description.runtime.strategy),
            # Over SSH, the agent's login is not the user's login.
            "ends_at_logout": job.description.backend == "local",
        }
        for warm in warm_specs(specs)
    ]


def import_env(env: Mapping[str, str | None]) -> dict[str, str | None]:
    """The variables that affect imports, or which program a command starts."""
    return {k: v for k, v in env.items() if is_import_variable(k) or k == "PATH"}


def by_key(specs: Iterable[TaskSpec]) -> dict[str | None, TaskSpec]:
    """One task for each key of a warm interpreter."""
    return {spec.warm: spec for spec in specs}


def taken_lines(taken: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences for the user; ``taken``: host -> what its agent has reported."""
    by_text: dict[str, list[str]] = {}
    for host, kept in taken.items():
        libraries = kept.get("libraries")
        words = libraries_text(libraries if isinstance(libraries, dict) else {})
        by_text.setdefault(words, []).append(host)
    lines = []
    for words, hosts in by_text.items():
        many = "kept interpreters" if hosts[1:] else "a kept interpreter"
        pid = "" if hosts[1:] else f" (pid {taken[hosts[0]].get('pid')})"
        lines.append(f"{fold(hosts)}: took {many} with {words}{pid}")
    return lines


def libraries_text(libraries: Mapping[str, Any]) -> str:
    """``TensorFlow 2.21.0, Keras 3.15.0``."""
    titles = {"tensorflow": "TensorFlow", "keras": "Keras"}
    return ", ".join(
        f"{titles.get(name, name)} {version}" for name, version in libraries.items()
    )

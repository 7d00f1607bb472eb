"""The hosts of a job: which of them is this one, and which GPUs the job has on each.

Sites use different names for the variables that list GPUs, which are valid only on the
host itself.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tfcluster.base.errors import ConfigError, Problem, StartError
from tfcluster.plan.host_patterns import host_name_problem
from tfcluster.plan.model import Description, Host
from tfcluster.schedulers.base import asker

ASK_S = 60.0
CUDA = ("CUDA_VISIBLE_DEVICES",)

_GPU = re.compile(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_NO_GPUS = {"", "-1", "none", "NoDevFiles"}
_MARK = "tfcluster-gpus"
_AT_ONCE = 32


def hosts_with_gpus(
    slots: Mapping[str, int],
    description: Description,
    env: Mapping[str, str],
    ask: Callable[[Sequence[str]], dict[str, tuple[str, ...] | None]],
    variables: Sequence[str] = CUDA,
) -> list[Host]:
    """The hosts with these slots; if tasks need GPUs, ``ask`` finds those of others."""
    own = own_names(env)
    others = [name for name in slots if not is_one_of(name, own)]
    devices = dict.fromkeys(slots, gpus_given(env, variables)) | dict.fromkeys(others)
    if others and any(group.gpus for group in description.tasks.values()):
        devices |= ask(others)
    return [
        Host(name=name, slots=count, gpus=devices[name])
        for name, count in slots.items()
    ]


def host_file(variable: str, path: str, stale: str) -> str:
    """The text of the file that ``variable`` names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        hint = f"it exists only while the job runs, on the host of its script; {stale}"
        raise ConfigError([Problem(f"{variable}={path!r}", problem, hint)]) from error


def require_host_names(where: str, names: Iterable[str], stale: str) -> None:
    """Raise ConfigError unless there are names, all of which can be those of hosts."""
    names = list(names)
    for name in names:
        if wrong := host_name_problem(name):
            raise ConfigError([Problem(where, f"{name[:60]!r} {wrong}", stale)])
    if not names:
        raise ConfigError([Problem(where, "lists no host", stale)])


def own_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """This host's names, first the one that the scheduler gives it, as HOSTNAME."""
    names = (env.get("HOSTNAME", ""), socket.gethostname())
    return tuple(dict.fromkeys(name.lower() for name in names if name))


def is_one_of(name: str, own: Iterable[str]) -> bool:
    """Whether ``name`` is one of this host's names.

    A short and a qualified name match if their first labels are equal. Two qualified
    names must be equal, because clusters with several domains may reuse short names.
    """
    return any(_same(name.lower(), other) for other in own)


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    qualified = "." in one and "." in other
    return not qualified and one.partition(".")[0] == other.partition(".")[0]


def gpus_given(
    env: Mapping[str, str], variables: Sequence[str] = CUDA
) -> tuple[str, ...] | None:
    """The GPUs of the first variable that is set; None: none is, or invalid names."""
    for name in variables:
        text = env.get(name)
        if text is None:
            continue
        if text.strip() in _NO_GPUS:
            return ()
        words = tuple(text.replace(",", " ").split())
        return words if all(map(_GPU.fullmatch, words)) else None
    return None


def gpu_question(variables: Sequence[str] = CUDA) -> str:
    """A shell command whose output ``parse_gpus`` reads; no user input goes into it."""
    values = "|".join(f"${{{name}-unset}}" for name in variables)
    return f'echo "{_MARK} {values}"'


def gpus_on(
    hosts: Sequence[str],
    argv_on: Callable[[str], tuple[str, ...]],
    env: Mapping[str, str],
    variables: Sequence[str] = CUDA,
    meaning: Callable[[str], str | None] = lambda words: None,
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, by ``argv_on(host)``. Raises StartError."""

    def one(host: str) -> tuple[str, ...] | None:
        answer = asker(env, ASK_S)(argv_on(host))
        words = answer.stderr.strip()
        if answer.exit_code != 0:
            cause = meaning(words) or words or f"exit status {answer.exit_code}"
            raise StartError(f"{host}: its GPUs cannot be queried: {cause}")
        return parse_gpus(host, answer.stdout, variables)

    from concurrent.futures import ThreadPoolExecutor  # imported here: it takes long

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def parse_gpus(
    host: str, answer: str, variables: Sequence[str] = CUDA
) -> tuple[str, ...] | None:
    """The GPUs in the answer of ``host``. Raises StartError if there is no answer."""
    for line in answer.splitlines():
        mark, _, values = line.partition(" ")
        if mark == _MARK:
            pairs = zip(variables, values.split("|"), strict=False)
            return gpus_given({k: v for k, v in pairs if v != "unset"}, variables)
    raise StartError(f"{host}: did not report the job's GPUs there")

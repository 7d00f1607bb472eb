"""Finds the GPUs that a job was given on each host, from environment variables there.

Sites use different names for these variables, which are valid only on the host itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from tfcluster.errors import StartError
from tfcluster.schedulers.queries import asker

ASK_S = 60.0
CUDA = ("CUDA_VISIBLE_DEVICES",)

_GPU = re.compile(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_NO_GPUS = {"", "-1", "none", "NoDevFiles"}
_MARK = "tfcluster-gpus"
_AT_ONCE = 32


def given(
    env: Mapping[str, str], variables: Sequence[str] = CUDA
) -> tuple[str, ...] | None:
    """The GPUs that the first of ``variables`` that is set names; () for none.

    None if no variable is set, or if its device names are not valid for CUDA.
    """
    for name in variables:
        text = env.get(name)
        if text is None:
            continue
        if text.strip() in _NO_GPUS:
            return ()
        words = tuple(text.replace(",", " ").split())
        return words if all(map(_GPU.fullmatch, words)) else None
    return None


def question(variables: Sequence[str] = CUDA) -> str:
    """A shell command whose output ``parse`` reads; no user input goes into it."""
    values = "|".join(f"${{{name}-unset}}" for name in variables)
    return f'echo "{_MARK} {values}"'


def ask(
    hosts: Sequence[str],
    argv_on: Callable[[str], tuple[str, ...]],
    env: Mapping[str, str],
    variables: Sequence[str] = CUDA,
    meaning: Callable[[str], str | None] = lambda words: None,
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, from ``question`` there. Raises StartError.

    ``argv_on`` gives the command for a host, and ``meaning`` explains its errors.
    """

    def one(host: str) -> tuple[str, ...] | None:
        answer = asker(env, ASK_S)(argv_on(host))
        words = answer.stderr.strip()
        if answer.exit_code != 0:
            cause = meaning(words) or words or f"exit status {answer.exit_code}"
            raise StartError(f"{host}: its GPUs cannot be queried: {cause}")
        return parse(host, answer.stdout, variables)

    from concurrent.futures import ThreadPoolExecutor  # imported here: it takes long

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def parse(
    host: str, said: str, variables: Sequence[str] = CUDA
) -> tuple[str, ...] | None:
    """The GPUs in the answer of ``host``. Raises StartError if there is no answer."""
    for line in said.splitlines():
        mark, _, values = line.partition(" ")
        if mark == _MARK:
            found = dict(zip(variables, values.split("|"), strict=False))
            known = {k: text for k, text in found.items() if text != "unset"}
            return given(known, variables)
    raise StartError(f"{host}: did not report the job's GPUs there")

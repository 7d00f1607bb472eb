"""Finds the GPUs that a job was given on each host, from environment variables there.

Sites use different names for these variables, which are valid only on the host itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfcluster.errors import StartError
from tfcluster.schedulers.queries import asker
from tfcluster.schedulers.sge.qrsh import meaning, qrsh_argv

ASK_S = 60.0

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SGE_HGR_gpu", "SGV_HGR_gpu", "SGE_GPU")
"""Variables that name GPUs; the first one that is set counts."""
_GPU = re.compile(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+")
_NO_GPUS = {"", "-1", "none", "NoDevFiles"}
_MARK = "tfcluster-gpus"
_AT_ONCE = 32

# A constant: no user input goes into this shell command.
_ASK = f'echo "{_MARK} ' + "|".join(f"${{{name}-unset}}" for name in _VARIABLES) + '"'


def given(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that these variables name; () for none.

    None if no variable is set, or if its device names are not valid for CUDA.
    """
    for name in _VARIABLES:
        text = env.get(name)
        if text is None:
            continue
        if text.strip() in _NO_GPUS:
            return ()
        words = tuple(text.replace(",", " ").split())
        return words if all(map(_GPU.fullmatch, words)) else None
    return None


def ask(
    qrsh: str, hosts: Sequence[str], env: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, from a qrsh task on each. Raises StartError."""

    def one(host: str) -> tuple[str, ...] | None:
        argv = qrsh_argv(qrsh, host, ("/bin/sh", "-c", _ASK))
        return parse(host, _output(host, argv, env))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def parse(host: str, said: str) -> tuple[str, ...] | None:
    """The GPUs in the answer of ``host``. Raises StartError if there is no answer."""
    for line in said.splitlines():
        mark, _, values = line.partition(" ")
        if mark == _MARK:
            found = dict(zip(_VARIABLES, values.split("|"), strict=False))
            return given({k: text for k, text in found.items() if text != "unset"})
    raise StartError(f"{host}: did not report the job's GPUs there")


def _output(host: str, argv: tuple[str, ...], env: Mapping[str, str]) -> str:
    answer = asker(env, ASK_S)(argv)
    words = answer.stderr.strip()
    if answer.exit_code != 0:
        cause = meaning(words) or words or f"exit status {answer.exit_code}"
        raise StartError(f"{host}: its GPUs cannot be queried: {cause}")
    return answer.stdout

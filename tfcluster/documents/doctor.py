"""What ``doctor`` prints."""

from __future__ import annotations

from typing import Annotated, TypedDict

from tfcluster.documents.json_schema import FormatVersion


class UnknownFact(TypedDict):
    """A fact that could not be found out."""

    error: Annotated[str, "Why this could not be found out."]


class GpuFact(TypedDict):
    """A GPU of a host."""

    name: str
    used_mib: Annotated[int, "MiB of memory in use."]


class ImportTrial(TypedDict, total=False):
    """An import of TensorFlow."""

    seconds: Annotated[float, "How long importing TensorFlow took."]
    error: Annotated[str, "The last line of its error."]


# "import" is a keyword of Python.
HostFacts = TypedDict(
    "HostFacts",
    {
        "clock": Annotated[float | UnknownFact, "Seconds since the epoch."],
        "python": Annotated[str | UnknownFact, "The version."],
        "executable": Annotated[str | UnknownFact, "The interpreter."],
        "marked": Annotated[
            bool | UnknownFact,
            "Whether TFCLUSTER_RUN reaches Python: a command that starts it may remove "
            "variables.",
        ],
        "packages": Annotated[
            dict[str, str | None], "Installed versions; null: not installed."
        ],
        "peers": Annotated[
            dict[str, str], "For each other host, `reached` or why not."
        ],
        "names": Annotated[
            dict[str, list[str] | str],
            "The addresses to which the names of the other hosts resolve.",
        ],
        "gpus": list[GpuFact] | UnknownFact,
        "files": Annotated[
            dict[str, bool | str], "Whether these files and folders exist."
        ],
        "disks": Annotated[
            dict[str, int | str], "Free bytes in folders that a run writes to."
        ],
        "limits": Annotated[dict[str, int | str], "Soft limits; -1: unlimited."],
        "proxies": Annotated[dict[str, str], "Variables that set a proxy."],
        "import": ImportTrial,
    },
    total=False,
)


class HostReport(TypedDict):
    """What was found on a host."""

    host: str
    address: str | None
    error: Annotated[str | None, "Why there are no facts about it."]
    clock_error_s: Annotated[
        float | None, "How far its clock is ahead for certain, in seconds."
    ]
    facts: Annotated[HostFacts, "What was found, as far as known."]


class HostFinding(TypedDict):
    """A problem of a host."""

    host: str
    text: Annotated[str, "The problem."]
    error: Annotated[bool, "A launch would fail because of it."]


class Diagnosis(TypedDict):
    """What was found on the hosts: tfcluster doctor --json"""

    schema: FormatVersion
    hosts: list[HostReport]
    findings: list[HostFinding]

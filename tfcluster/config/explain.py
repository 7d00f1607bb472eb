"""Turns mistakes into messages for the author of the file.

It works on the sort of mistake, its path and the node there: the node's raw text shows
where YAML read something that the author did not mean. Knows the shape of cluster.yaml
only through the models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from tfcluster import schedulers
from tfcluster.config.diagnostics import Findings
from tfcluster.config.models import (
    ClusterSection,
    HostItem,
    ResultsSection,
    SecretSource,
    TaskSection,
    Workdir,
)
from tfcluster.config.shape import Key, Nested, Section, Widened, Wrong
from tfcluster.config.text import cut, printable
from tfcluster.config.tree import Found, Path, Scalar, find, shown
from tfcluster.config.yaml11_scalars import EMPTY, Misread
from tfcluster.schedulers.base import Scheduler

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "": {
        "run": "command",
        "cmd": "command",
        "script": "command",
        "entrypoint": "command",
        "environment": "env",
        "cluster": "tasks",
        "cwd": "workdir",
        "working_dir": "workdir",
    },
    "tasks": {
        "master": "chief",
        "parameter_server": "ps",
        "workers": "worker",
        "replicas": "worker",
    },
}
"""Section ("": the top level) -> another word for a key -> the key."""

OF_SECTIONS = dict.fromkeys(("job_extra", "job_extra_directives", "extra"), "options")
"""Other words for keys that the sections of all schedulers have."""

_GPUS = "tasks: {worker: {count: 2, gpus: 1}}"
_TASKS = "tasks: {worker: 4}"
_OF_GPUS = dict.fromkeys(
    ("gpus", "gpu", "num_gpus", "ngpus", "n_gpus", "gres", "gpus_per_task"), _GPUS
)
_OF_TASKS = dict.fromkeys(
    ("ntasks", "n", "np", "nprocs", "num_workers", "n_workers", "processes"), _TASKS
)
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "": {**_OF_GPUS, **_OF_TASKS, "workers": _TASKS},
    "tasks": _OF_GPUS,
}
"""Section -> a word for which there is no single key -> what to write."""

EXAMPLES_OF_SECTIONS = {
    **_OF_GPUS,
    **_OF_TASKS,
    "env_extra": "env: {NAME: value}, at the top level",
}
"""The same for the sections of all schedulers."""


def explain(wrong: Wrong, findings: Findings, cluster: type[ClusterSection]) -> None:
    """Add a message for one mistake, about ``cluster``, to ``findings``."""
    path, sort = wrong.path, wrong.sort
    found = find(findings.root, path)
    place = findings.key_mark(path) if wrong.of_key else found.node.mark
    if sort == "missing":
        message, hint = _missing(path)
    elif sort == "unknown":
        place = findings.key_mark(path)
        message, hint = _unknown_key(path, cluster)
    elif path[:1] == ("secrets",) and not wrong.of_key:
        message, hint = _of_secret(wrong, found)
    elif sort == "refused":
        message, hint = wrong.what, wrong.hint
    elif not wrong.of_key and (misread := _misread(found)):
        message, hint = misread
    elif sort == "word":
        message, hint = _unknown_word(found, wrong.words)
    else:
        message, hint = _mismatch(wrong, found)
    findings.report.error(place, message, hint)


_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,40}")
_Words = tuple[str, str | None]


def _of_secret(wrong: Wrong, found: Found) -> _Words:
    """A message that does not show the value, which may be the secret itself."""
    what = "the name of a variable" if wrong.sort == "refused" else wrong.what
    inside = found.key is not None and found.name != "secrets"
    name = found.name if inside else "NAME"
    hint = (
        f"give the source of its value: {name}: {{file: ~/.secret}}, or {{env: NAME}}"
    )
    if found.name in SecretSource.known:
        hint = "its value is not shown here"
    return f"{printable(found.name)!r} must be {what or 'something else'}", hint


def _missing(path: Path) -> _Words:
    inside = f" in {_dotted(path[:-1])!r}" if path[:-1] else ""
    hint = "tasks: {worker: 2}" if path == ("tasks",) else None
    return f"missing {str(path[-1])!r}{inside}", hint


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _unknown_key(path: Path, cluster: type[ClusterSection]) -> _Words:
    key, parent = str(path[-1]), path[:-1]
    model = _model_at(parent, cluster)
    message = f"unknown key {cut(key)!r}"
    if known := _synonym(key, _dotted(parent), cluster):
        return message, known
    if owner := _owner_of(key, model, cluster):
        return f"{key!r} belongs {owner}", None
    if model is None:
        return message, None
    hint = suggestion(key, model.known)
    scheduler = _scheduler_of(_dotted(parent), cluster)
    if scheduler and scheduler.option_hint and not hint.startswith("did"):
        option = key.removeprefix(f"{scheduler.name}_").replace("_", "-")
        if _OPTION.fullmatch(option):
            hint += f"; {scheduler.option_hint.format(option)}"
    return message, hint


def _synonym(key: str, section: str, cluster: type[ClusterSection]) -> str | None:
    """A hint for a word of other software, in any case, with - or _ between words."""
    word = key.lower().replace("-", "_")
    synonyms = SYNONYMS.get(section, {})
    examples = EXAMPLES.get(section, {})
    if scheduler := _scheduler_of(section, cluster):
        # Other software writes the section's name before its keys.
        word = word.removeprefix(f"{section}_")
        synonyms = {**OF_SECTIONS, **scheduler.every_synonym()}
        examples = {**EXAMPLES_OF_SECTIONS, **scheduler.advice}
    if found := synonyms.get(word):
        return f"did you mean {found!r}?"
    if word != key and word in _sections(cluster).get(section, cluster).known:
        return f"did you mean {word!r}?"
    return examples.get(word)


def _scheduler_of(section: str, cluster: type[ClusterSection]) -> Scheduler | None:
    """The scheduler to which a section belongs; None for other sections."""
    added = section in cluster.known and section not in ClusterSection.known
    return schedulers.find(section) if added else None


def _model_at(path: Path, cluster: type[ClusterSection]) -> type[Section] | None:
    match path:
        case ():
            return cluster
        case ("workdir",):
            return Workdir
        case ("workdir", "results"):
            return ResultsSection
        case ("tasks", str()):
            return TaskSection
        case ("hosts", int()):
            return HostItem
        case ("secrets", str()):
            return SecretSource
        case (str(section),):
            return _sections(cluster).get(section)
    return None


def _sections(cluster: type[ClusterSection]) -> Mapping[str, type[Section]]:
    return {
        name: section
        for name, key in cluster.known.items()
        if (section := _section_of(key)) is not None
    }


def _section_of(key: Key) -> type[Section] | None:
    """The section that a key always has, whether it is in the file or not."""
    kind = key.kind.kind if isinstance(key.kind, Widened) else key.kind
    given = key.required or key.default is not None
    return kind.section if given and isinstance(kind, Nested) else None


def _owner_of(
    key: str, model: type[Section] | None, cluster: type[ClusterSection]
) -> str | None:
    """The section to which a key that is unknown here belongs; None: no section."""
    owners = [
        f"under '{name}:'"
        for name, section in _sections(cluster).items()
        if key in section.known and section is not model
    ]
    if key in cluster.known and model is not cluster:
        owners.insert(0, "at the top level")
    return " or ".join(owners) or None


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word."""
    words = list(known)
    near = difflib.get_close_matches(word[:64], words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(words)}"


def _misread(found: Found) -> _Words | None:
    """Message and hint if YAML reads a scalar differently from what people mean."""
    if not isinstance(found.node, Scalar):
        return None
    value = found.node.value
    if value is EMPTY:
        return f"{found.name!r} {EMPTY.message}", EMPTY.hint
    if isinstance(value, Misread):
        return f"{found.name!r}: {value.message}", value.hint
    return None


def _unknown_word(found: Found, words: Sequence[str]) -> _Words:
    node = found.node
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        what = f"one of {', '.join(words)}"
        return f"{found.name!r} must be {what}; found {shown(node)}", None
    return f"unknown {found.name} {printable(node.raw)!r}", suggestion(node.raw, words)


def _mismatch(wrong: Wrong, found: Found) -> _Words:
    node, what, hint = found.node, wrong.what, wrong.hint
    if wrong.sort == "empty":
        return f"{found.name!r} {EMPTY.message}", EMPTY.hint
    if wrong.sort == "bound" and what.endswith("at least 1") and shown(node) == "0":
        hint = "for none, omit the key"
    elif wrong.sort == "type":
        hint = _quoting_hint(what, found)
    if wrong.of_key and found.key:
        return f"{printable(found.key.raw)!r} must be {what}", hint
    return f"{found.name!r} must be {what}; found {shown(node)}", hint


def _quoting_hint(what: str, found: Found) -> str | None:
    node = found.node
    if not isinstance(node, Scalar):
        return None
    raw, read = printable(node.raw), node.value
    if what == "text" and isinstance(read, bool):
        meaning = str(read).lower()
        note = "" if node.raw == meaning else f"YAML reads {raw} as {meaning}; "
        return f'{note}quote it: "{raw}"'
    if what == "text":
        note = f"YAML reads {raw} as {read}; " if str(read) != raw else ""
        return f'{note}quote it: "{raw}"'
    if what == "a mapping" and found.name == "tasks" and isinstance(read, int):
        return f"tasks: {{worker: {raw}}}"
    if what == "a list":
        # Inside a YAML list, the brackets of a hostlist must be quoted.
        item = f'"{raw}"' if "[" in raw else raw
        return f"write: [{item}]"
    if what.endswith("number") and isinstance(read, str):
        return _number_hint(node)
    return None


def _number_hint(node: Scalar) -> str | None:
    if node.plain and (match := re.fullmatch(r"(-?[0-9]+)(\.?)e(.+)", node.raw)):
        sign = "" if match[3][0] in "+-" else "+"
        return f"YAML reads it as text; write {match[1]}.0e{sign}{match[3]}"
    if not node.plain and re.fullmatch(r"[0-9.]+", node.raw):
        return "remove the quotes"
    return None

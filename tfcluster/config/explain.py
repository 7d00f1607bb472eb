"""Turns mistakes into messages for the author of the file.

It works on the sort of mistake, its path and the node there: the node's raw text shows
where YAML read something that the author did not mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from tfcluster import schedulers
from tfcluster.config.diagnostics import Findings
from tfcluster.config.models import ClusterSection, SecretSource
from tfcluster.config.shape import Key, Misfit, Nested, Section
from tfcluster.config.tree import Lookup, Path, Scalar, cut, find, printable, shown
from tfcluster.config.yaml11_scalars import EMPTY, Misread
from tfcluster.schedulers.base import Scheduler

_SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(("run", "cmd", "script", "entrypoint"), "command"),
        "environment": "env",
        "cluster": "tasks",
        **dict.fromkeys(("cwd", "working_dir"), "workdir"),
    },
    "tasks": {
        "master": "chief",
        "parameter_server": "ps",
        **dict.fromkeys(("workers", "replicas"), "worker"),
    },
}
"""Section ("": the top level) -> another word for a key -> the key."""

_SYNONYMS_OF_SCHEDULERS = dict.fromkeys(
    ("job_extra", "job_extra_directives", "extra"), "options"
)

_GPUS = "tasks: {worker: {count: 2, gpus: 1}}"
_TASKS = "tasks: {worker: 4}"
_OF_GPUS = dict.fromkeys(
    ("gpus", "gpu", "num_gpus", "ngpus", "n_gpus", "gres", "gpus_per_task"), _GPUS
)
_OF_TASKS = dict.fromkeys(
    ("ntasks", "n", "np", "nprocs", "num_workers", "n_workers", "processes"), _TASKS
)
_EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "": {**_OF_GPUS, **_OF_TASKS, "workers": _TASKS},
    "tasks": _OF_GPUS,
}
"""Section -> a word for which there is no single key -> what to write."""

_EXAMPLES_OF_SCHEDULERS = {
    **_OF_GPUS,
    **_OF_TASKS,
    "env_extra": "env: {NAME: value}, at the top level",
}


def explain(misfit: Misfit, findings: Findings, cluster: type[ClusterSection]) -> None:
    """Add a message for one mistake, about ``cluster``, to ``findings``."""
    path, of_key = misfit.path, misfit.of_key
    place = find(findings.root, path)
    mark = findings.key_mark(path) if of_key else place.node.mark
    if misfit.sort == "missing":
        message, hint = _missing(path)
    elif misfit.section is not None:
        message, hint = _unknown_key(path, misfit.section, cluster)
    elif path[:1] == ("secrets",) and not of_key:
        message, hint = _of_secret(misfit, place)
    elif misfit.sort == "refused":
        message, hint = misfit.what, misfit.hint
    elif not of_key and (misread := _misread(place)):
        message, hint = misread
    elif misfit.sort == "word":
        message, hint = _unknown_word(place, misfit.words)
    else:
        message, hint = _mismatch(misfit, place)
    findings.report.error(mark, message, hint)


_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,40}")
_Words = tuple[str, str | None]


def _of_secret(misfit: Misfit, place: Lookup) -> _Words:
    """A message that does not show the value, which may be the secret itself."""
    what = "the name of a variable" if misfit.sort == "refused" else misfit.what
    inside = place.key is not None and place.name != "secrets"
    name = place.name if inside else "NAME"
    hint = (
        f"give the source of its value: {name}: {{file: ~/.secret}}, or {{env: NAME}}"
    )
    if place.name in SecretSource.keys:
        hint = "its value is not shown here"
    return f"{printable(place.name)!r} must be {what or 'something else'}", hint


def _missing(path: Path) -> _Words:
    inside = f" in {_dotted(path[:-1])!r}" if path[:-1] else ""
    hint = "tasks: {worker: 2}" if path == ("tasks",) else None
    return f"missing {str(path[-1])!r}{inside}", hint


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _unknown_key(
    path: Path, section: type[Section], cluster: type[ClusterSection]
) -> _Words:
    key, name = str(path[-1]), _dotted(path[:-1])
    message = f"unknown key {cut(key)!r}"
    added = name in cluster.keys and name not in ClusterSection.keys
    scheduler = schedulers.find(name) if added else None
    if synonym := _synonym(key, name, section, scheduler):
        return message, synonym
    if owner := _owner_of(key, section, cluster):
        return f"{key!r} belongs {owner}", None
    hint = suggestion(key, section.keys)
    if scheduler and scheduler.option_hint and not hint.startswith("did"):
        option = key.removeprefix(f"{scheduler.name}_").replace("_", "-")
        if _OPTION.fullmatch(option):
            hint += f"; {scheduler.option_hint.format(option)}"
    return message, hint


def _synonym(
    key: str, name: str, section: type[Section], scheduler: Scheduler | None
) -> str | None:
    """A hint for a word of other software, in any case, with - or _ between words."""
    word = key.lower().replace("-", "_")
    synonyms, examples = _SYNONYMS.get(name, {}), _EXAMPLES.get(name, {})
    if scheduler:
        # Other software writes the section's name before its keys.
        word = word.removeprefix(f"{name}_")
        synonyms = {**_SYNONYMS_OF_SCHEDULERS, **scheduler.every_synonym()}
        examples = {**_EXAMPLES_OF_SCHEDULERS, **scheduler.advice}
    ours = synonyms.get(word) or (word if word in section.keys else None)
    return f"did you mean {ours!r}?" if ours else examples.get(word)


def _owner_of(
    key: str, section: type[Section], cluster: type[ClusterSection]
) -> str | None:
    owners = ["at the top level"] if key in cluster.keys else []
    for name, owner in cluster.keys.items():
        other = _section_of(owner)
        if other not in (None, section) and key in other.keys:
            owners.append(f"under '{name}:'")
    return " or ".join(owners) or None


def _section_of(key: Key) -> type[Section] | None:
    kind = key.kind
    always = key.required or key.default is not None
    return kind.section if always and isinstance(kind, Nested) else None


def suggestion(word: str, words: Iterable[str]) -> str:
    words = list(words)
    near = difflib.get_close_matches(word[:64], words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(words)}"


def _misread(place: Lookup) -> _Words | None:
    """Message and hint if YAML reads a scalar differently from what people mean."""
    if not isinstance(place.node, Scalar):
        return None
    value = place.node.value
    if value is EMPTY:
        return f"{place.name!r} {EMPTY.message}", EMPTY.hint
    if isinstance(value, Misread):
        return f"{place.name!r}: {value.message}", value.hint
    return None


def _unknown_word(place: Lookup, words: Sequence[str]) -> _Words:
    node = place.node
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        what = f"one of {', '.join(words)}"
        return f"{place.name!r} must be {what}; found {shown(node)}", None
    return f"unknown {place.name} {printable(node.raw)!r}", suggestion(node.raw, words)


def _mismatch(misfit: Misfit, place: Lookup) -> _Words:
    node, what, hint = place.node, misfit.what, misfit.hint
    if misfit.sort == "empty":
        return f"{place.name!r} {EMPTY.message}", EMPTY.hint
    if misfit.sort == "bound" and what.endswith("at least 1") and shown(node) == "0":
        hint = "for none, omit the key"
    elif misfit.sort == "type":
        hint = _quoting_hint(what, place)
    if misfit.of_key and place.key:
        return f"{printable(place.key.raw)!r} must be {what}", hint
    return f"{place.name!r} must be {what}; found {shown(node)}", hint


def _quoting_hint(what: str, place: Lookup) -> str | None:
    node = place.node
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
    if what == "a mapping" and place.name == "tasks" and isinstance(read, int):
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

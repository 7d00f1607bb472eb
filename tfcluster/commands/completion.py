"""What a shell may complete: runs, tasks, and the keys and values of ``--set``.

Reads the record and the schema, and changes nothing: pressing TAB creates no folder.

A script of a shell gives the command line up to the cursor to ``tfcluster`` in an
environment variable, and reads lines: first the kind of answer (``values``, ``files``
or ``commands``), a TAB and the word at the cursor, then each value, a TAB and a
description. Where tfcluster knows no value, or cannot be started, the shell completes
the names of files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ConfigError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.state_folder import state_path
from tfcluster.base.task_id import TaskId
from tfcluster.record.files import read_json
from tfcluster.record.paths import find, runs

_NEWEST_RUNS = 50
"""The most words for a shell, which lists them all: more would help nobody."""
_LINE_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Word:
    """A word that may be completed, and what zsh and fish show beside it."""

    text: str
    about: str = ""


def run_words(environ: Mapping[str, str]) -> list[Word]:
    """Names of runs, then ids of the newest runs, newest first."""
    newest = runs(state_path(environ))[:_NEWEST_RUNS]
    names = dict.fromkeys(paths.name for paths in newest)
    return [
        *(Word(name, "newest run of this name") for name in names),
        *(Word(paths.run, "run") for paths in newest),
    ]


def task_words(run: str | None, environ: Mapping[str, str]) -> list[Word]:
    """The types and tasks of a run; of the newest run if ``run`` is None."""
    try:
        plan = read_json(find(state_path(environ), run).plan) or {}
    except ConfigError:
        return []
    tasks = [TaskId.parse(entry["task"]) for entry in plan.get("tasks", ())]
    kinds = dict.fromkeys(task.type for task in tasks)
    return [
        *(Word(kind, f"all {kind} tasks") for kind in kinds),
        *(Word(str(task), "task") for task in tasks),
    ]


def result_words(run: str, environ: Mapping[str, str]) -> list[Word]:
    """The patterns of the results of a run's configuration."""
    try:
        known = read_json(find(state_path(environ), run).launched) or {}
        patterns = known["description"]["results"]["patterns"]
        return [Word(str(each), "a result") for each in patterns]
    except (ConfigError, KeyError, TypeError):
        return []


def setting_words(written: str, schema: Mapping[str, Any]) -> list[Word]:
    """How ``KEY=VALUE`` may continue, one level of the dotted key at a time.

    ``runtime.`` leads to ``runtime.strategy=``, and that to ``runtime.strategy=none``.
    """
    key, equals, _ = written.partition("=")
    parents, _, last = key.rpartition(".")
    shapes = [schema]
    for part in filter(None, parents.split(".")):
        shapes = [below for _, below in _fields(shapes, schema, part)]
    if equals:
        fields = [field for _, field in _fields(shapes, schema, last)]
        return [
            Word(f"{key}={value}") for value in dict.fromkeys(_values(fields, schema))
        ]
    start = f"{parents}." if parents else ""
    words = []
    for name, field in _fields(shapes, schema):
        about = _about(field, schema)
        kinds = _expand([field], schema)
        if any("properties" in kind or kind.get("type") == "object" for kind in kinds):
            words.append(Word(f"{start}{name}.", about))
        if any(kind.get("type") != "object" for kind in kinds):
            words.append(Word(f"{start}{name}=", about))
    return words


def schema() -> Mapping[str, Any]:
    """The JSON Schema of cluster.yaml, from the file of an installed package.

    Reading it is faster than making it, as is done if there is no such file.
    """
    with contextlib.suppress(OSError):
        file = Path(PACKAGE_ROOT) / "tfcluster" / "cluster.schema.json"
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return read
    from tfcluster import config

    return config.schema()


def _expand(
    shapes: list[Mapping[str, Any]], schema: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The shapes with references and choices resolved."""
    plain: list[Mapping[str, Any]] = []
    for shape in shapes:
        if "$ref" in shape:
            name = str(shape["$ref"]).rpartition("/")[2]
            plain += _expand([schema["$defs"][name]], schema)
        elif "anyOf" in shape:
            plain += _expand(shape["anyOf"], schema)
        else:
            plain.append(shape)
    return plain


def _fields(
    shapes: list[Mapping[str, Any]], schema: Mapping[str, Any], name: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for shape in _expand(shapes, schema):
        for key, field in shape.get("properties", {}).items():
            if name in (None, key):
                yield key, field


def _values(
    shapes: list[Mapping[str, Any]], schema: Mapping[str, Any]
) -> Iterator[str]:
    for shape in _expand(shapes, schema):
        yield from (str(value) for value in shape.get("enum", ()))
        if "const" in shape:
            yield str(shape["const"])
        if shape.get("type") == "boolean":
            yield from ("true", "false")


def _about(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    said = field.get("description", "")
    if not said and "$ref" in field:
        said = schema["$defs"][field["$ref"].rpartition("/")[2]].get("description", "")
    first = str(said).partition("\n")[0]
    return first if len(first) <= _LINE_COLUMNS else first[: _LINE_COLUMNS - 1] + "…"


# Bash splits words at COMP_WORDBREAKS, which has "=" and ":" by default, and replaces
# only the part after the last of these.
_BASH = r"""# Completion of tfcluster for bash 4.4 and later.
_tfcluster() {
    local program="${1/#\~/$HOME}" kind="" word="" value="" rest=""
    local -a values=()
    COMPREPLY=()
    {
        IFS=$'\t' read -r kind word
        while IFS=$'\t' read -r value rest; do values+=("$value"); done
    } < <(_TFCLUSTER_COMPLETE=bash _TFCLUSTER_LINE="${COMP_LINE:0:COMP_POINT}" \
        "$program" 2>/dev/null)
    if [[ $kind == commands && $word != */* ]]; then
        mapfile -t COMPREPLY < <(compgen -c -- "$word" | sort -u)
    fi
    [[ $kind == values ]] || return 0
    local separator kept=""
    for separator in = :; do
        if [[ $COMP_WORDBREAKS == *"$separator"* && $word == *"$separator"* ]]; then
            value="${word%"${word##*"$separator"}"}"
            ((${#value} > ${#kept})) && kept="$value"
        fi
    done
    for value in "${values[@]}"; do COMPREPLY+=("${value#"$kept"}"); done
    [[ ${#values[@]} -gt 0 && "${values[*]: -1}" == *[=.] ]] && compopt -o nospace
    return 0
}
complete -o default -o bashdefault -o nosort -F _tfcluster tfcluster
"""

_ZSH = r"""#compdef tfcluster
# Completion of tfcluster for zsh.
_tfcluster() {
    local kind line value typed="${(j: :)words[1,CURRENT-1]} ${PREFIX}"
    local -a lines described open
    lines=("${(@f)$(_TFCLUSTER_COMPLETE=zsh _TFCLUSTER_LINE="$typed" \
        ${~${(Q)words[1]}} 2>/dev/null)}")
    kind=${lines[1]%%$'\t'*}
    for line in "${(@)lines[2,-1]}"; do
        value=${line%%$'\t'*}
        [[ -n $value ]] || continue
        if [[ $value == *[=.] ]]; then
            open+=("${value//:/\\:}:${line#*$'\t'}")
        else
            described+=("${value//:/\\:}:${line#*$'\t'}")
        fi
    done
    if [[ $kind == commands ]]; then
        _alternative 'commands:command:_command_names -e' 'files:file:_files'
    elif (( ! $#described && ! $#open )); then
        _files
    else
        (( $#described )) && _describe -t values value described
        (( $#open )) && _describe -t keys key open -S ''
        return 0
    fi
}
if [[ ${zsh_eval_context[-1]} == loadautofunc ]]; then
    _tfcluster "$@"
else
    compdef _tfcluster tfcluster
fi
"""

_FISH = r"""# Completion of tfcluster for fish 3.1 and later.
function __tfcluster_complete
    set -l program (string replace -r '^~' $HOME -- (commandline -opc)[1])
    set -lx _TFCLUSTER_COMPLETE fish
    set -lx _TFCLUSTER_LINE (commandline -cp | string collect)
    set -l answer ($program 2>/dev/null)
    set -l head (string split \t -- "$answer[1]")
    if test "$head[1]" = commands
        __fish_complete_command
        __fish_complete_path "$head[2]"
    else if test "$head[1]" = values; and set -q answer[2]
        printf '%s\n' $answer[2..]
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c tfcluster --no-files --keep-order -a '(__tfcluster_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

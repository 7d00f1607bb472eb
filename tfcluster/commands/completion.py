"""What a shell may complete: runs, tasks, and the keys and values of ``--set``.

A shell's script puts the command line into an environment variable, and reads lines:
the kind of answer (``values``, ``files`` or ``commands``), a TAB and the word at the
cursor, then each value, a TAB and a description. Creates no folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfcluster.base.errors import ConfigError
from tfcluster.base.state_folder import state_path
from tfcluster.base.task_id import TaskId
from tfcluster.config.sections import cluster_model, relevant
from tfcluster.config.shape import Key, MapOf, Nested
from tfcluster.record.files import read_json
from tfcluster.record.paths import find, runs

_NEWEST_RUNS = 50
"""The most words for a shell, which lists them all: more would help nobody."""
_LINE_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class Word:
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


def setting_words(written: str) -> list[Word]:
    """How ``KEY=VALUE`` may continue, one level of the dotted key at a time."""
    path, equals, _ = written.partition("=")
    *parents, last = path.split(".")
    keys: Mapping[str, Key] = cluster_model(relevant(())).keys
    for name in parents:
        kind = keys[name].kind if name in keys else None
        keys = kind.section.keys if isinstance(kind, Nested) else {}
    if equals:
        schema = keys[last].json({}) if last in keys else {}
        return [Word(f"{path}={value}") for value in dict.fromkeys(_values(schema))]
    start = "".join(f"{name}." for name in parents)
    words = []
    for name, key in keys.items():
        about = key.about
        if len(about) > _LINE_COLUMNS:
            about = about[: _LINE_COLUMNS - 1] + "…"
        below = isinstance(key.kind, MapOf | Nested)
        if below:
            words.append(Word(f"{start}{name}.", about))
        if not below or (isinstance(key.kind, Nested) and key.kind.section.shorthand):
            words.append(Word(f"{start}{name}=", about))
    return words


def _values(schema: Mapping[str, Any]) -> Iterator[str]:
    for choice in schema.get("anyOf", ()):
        yield from _values(choice)
    yield from map(str, schema.get("enum", ()))
    if "const" in schema:
        yield str(schema["const"])
    if schema.get("type") == "boolean":
        yield from ("true", "false")


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

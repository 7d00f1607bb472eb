"""The completion scripts of bash, zsh and fish.

Each gives the command line up to the cursor to ``tfcluster`` in an environment
variable, and reads lines: first the kind of answer (``values``, ``files`` or
``commands``), a TAB and the word at the cursor, then each value, a TAB and a
description. Where tfcluster knows no value, or cannot be started, the shell completes
the names of files.
"""

from __future__ import annotations

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

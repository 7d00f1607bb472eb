"""Answers the completion scripts of shells (``commands/completion``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from tfcluster.commands import completion, schema
from tfcluster.commands.record_query import split_words

_LINE = "_TFCLUSTER_LINE"
_FILES, _COMMANDS, _VALUES = "files", "commands", "values"


def answer(cli: click.Command, environ: Mapping[str, str]) -> str:
    """The answer to a shell's script; empty (file names) after an error."""
    try:
        words, word = _split(environ.get(_LINE, ""))
        items = ShellComplete(cli, {}, "tfcluster", "").get_completions(words, word)
    except Exception:
        return ""
    special = {item.type for item in items} & {_FILES, _COMMANDS}
    if special:
        return f"{special.pop()}\t{word}\n"
    # click completes the value of --set=VALUE, but the shell completes the whole word.
    start = ""
    if word.startswith("-") and "=" in word and "--" not in words:
        start = word.partition("=")[0] + "="
    lines = [f"{start}{item.value}\t{_first(item.help)}" for item in items]
    return "\n".join([f"{_VALUES if lines else _FILES}\t{word}", *lines, ""])


def complete(
    kind: str, context: click.Context, word: str, behind: int | None
) -> list[CompletionItem]:
    """The words of this kind that begin with ``word``, ``behind`` of them after --."""
    if kind == "command":
        return [CompletionItem(word, type=_command_or_files(context, behind))]
    return [
        CompletionItem(possible.text, help=possible.about)
        for possible in _words(kind, context, word)
        if possible.text.startswith(word)
    ]


def _words(kind: str, context: click.Context, word: str) -> Iterable[completion.Word]:
    if kind == "setting":
        return completion.setting_words(word)
    if kind == "variable":
        return [completion.Word(name) for name in sorted(os.environ)]
    if kind == "format":
        return [completion.Word(name) for name in schema.names()]
    if kind == "run":
        return completion.run_words(os.environ)
    run, tasks = split_words(context.params.get("words") or ())
    words = completion.task_words(run, os.environ)
    return words if run or tasks else [*completion.run_words(os.environ), *words]


def _command_or_files(context: click.Context, behind: int | None) -> str:
    """What the shell completes: commands for the word of the program, else files."""
    words = context.params.get("words") or ()
    if behind is None:
        first = bool(context.params.get("count")) and not words
    else:
        first = behind == 0 and not words
    return _COMMANDS if first else _FILES


def _split(line: str) -> tuple[list[str], str]:
    """The complete words after the program's name, and the word at the cursor."""
    words = split_arg_string(line)
    word = "" if not words or line[-1:].isspace() else words.pop()
    return words[1:], word


def _first(text: str | None) -> str:
    return " ".join((text or "").split())

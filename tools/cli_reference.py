"""Describes the command line from click's data, for the site and the man page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import click

_VERBATIM = "\b\n"
"""click's mark for a paragraph whose lines are kept."""


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph of help, or lines that are kept as they are."""

    text: str
    verbatim: bool


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """One command: its name with its groups' names, and what ``--help`` says."""

    name: str
    usage: str
    summary: str
    blocks: tuple[Block, ...]
    options: tuple[tuple[str, str], ...]
    """The names of each option, and its help."""


def commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[CommandHelp]:
    """The command and all visible commands below it, in the order of ``--help``."""
    context = click.Context(
        command,
        info_name=name.rpartition(" ")[2],
        parent=parent,
        **command.context_settings,
    )
    words = [context.command_path, *command.collect_usage_pieces(context)]
    records = (
        param.get_help_record(context)
        for param in command.get_params(context)
        if isinstance(param, click.Option)
    )
    yield CommandHelp(
        name=name,
        usage=" ".join(words),
        summary=command.get_short_help_str(limit=200),
        blocks=_blocks(command.help or ""),
        options=tuple(
            (names, " ".join(said.split())) for names, said in filter(None, records)
        ),
    )
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            child = command.get_command(context, below)
            if child is not None and not child.hidden:
                yield from commands(child, f"{name} {below}", context)


def _blocks(text: str) -> tuple[Block, ...]:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return tuple(
        Block(each.removeprefix(_VERBATIM), verbatim=True)
        if each.startswith(_VERBATIM)
        else Block(" ".join(each.split()), verbatim=False)
        for each in paragraphs
        if each.strip()
    )

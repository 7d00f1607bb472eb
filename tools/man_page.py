"""Makes the man page, tfcluster(1), from the command line's help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.cli_reference import Block, CommandHelp

_FILES = (
    ("$TFCLUSTER_STATE_DIR, $XDG_STATE_HOME/tfcluster or ~/.local/state/tfcluster",
     "Records and logs of runs."),
    ("cluster.yaml", "The configuration: tfcluster schema prints its JSON Schema."),
)  # fmt: skip


def man_page(commands: Sequence[CommandHelp], version: str) -> str:
    """The page as roff. The first command is the program itself."""
    program, *others = commands
    lines = [
        f'.TH TFCLUSTER 1 "" "tfcluster {version}" "User Commands"',
        ".SH NAME",
        r"tfcluster \- train an unmodified TensorFlow or Keras script on many machines",
        ".SH SYNOPSIS",
        *(line for each in others for line in (_bold(each.usage), ".br")),
        ".SH DESCRIPTION",
        *_body(program.blocks),
        *_options(program.options),
        ".SH COMMANDS",
    ]
    for each in others:
        lines += [f'.SS "{_escaped(each.usage)}"', *_body(each.blocks)]
        lines += _options(each.options)
    lines.append(".SH FILES")
    for path, about in _FILES:
        lines += [".TP", f".I {_escaped(path)}", _escaped(about)]
    return "\n".join(lines) + "\n"


def _body(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        if block.verbatim:
            yield from (".PP", ".RS 4", ".nf")
            yield from map(_escaped, block.text.splitlines())
            yield from (".fi", ".RE")
        else:
            yield from (".PP", _escaped(block.text))


def _options(options: Sequence[tuple[str, str]]) -> Iterator[str]:
    for names, about in options:
        yield from (".TP", _bold(names), _escaped(about))


def _bold(text: str) -> str:
    return f".B {_escaped(text)}"


def _escaped(text: str) -> str:
    """The text without roff commands, and with hyphens that can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{text}" if text.startswith((".", "'")) else text

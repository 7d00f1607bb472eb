"""Which of the user's own options a scheduler's command must not get, and why. Pure.

The same table serves every command that reads a configuration. A folder gives the
words; ``mistakes`` knows how options are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfcluster.base.light_dataclasses import dataclass, field

NOTHING = "nothing would be submitted"
ARRAY = "every element would be the same run; start one run for each"
FOLLOWS = "tfcluster follows the job itself"
SCRIPT = "tfcluster submits a script"
ENVIRONMENT = "other users could see the values; use 'env:' and 'secrets:'"
OUTPUT = "the launcher's output goes to the run's folder"
WORKDIR = "'workdir' sets where tasks run"
OTHER_USER = "a job runs as the user who submits it"
RESTART = "a run is not restarted by the scheduler"
BASH = "the script is written for bash"
SIZE = "the number of tasks follows from 'tasks'"

_NO_DASH = "is not an option: it does not begin with '-'"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A value that is refused, perhaps because of another one."""

    key: str
    """The dotted key of the value; for an option ``slurm.options.INDEX``."""
    message: str
    hint: str | None = None
    other: str | None = None
    """The dotted key of the other value."""
    fatal: bool = True
    """Whether it is an error, or only a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """The options of one command, such as sbatch."""

    command: str
    denied: Mapping[str, str]
    """Option -> why it is refused."""
    plain: re.Pattern[str]
    """What an item has to be so that the command reads it back from a directive."""
    letters: Mapping[str, str] = field(default_factory=dict)
    """Letter of a short option -> its long name; for ``joined`` ones."""
    joined: bool = False
    """Whether an option and its value are one item (``--time=1``, ``-t1``); otherwise
    each word is an item (``-l``, ``h_rt=1``)."""
    short: bool = False
    """Whether a word's first letter is the option, the rest its value (``-J1-3``)."""

    def name_of(self, word: str) -> str:
        """The option that a word begins; long if there are letters. "" for a value."""
        if not (word.startswith("-") if self.joined else is_option(word)):
            return ""
        if self.joined and not word.startswith("--"):
            return self.letters.get(word[1:2], word[:2])
        return word[:2] if self.short else word.partition("=")[0]

    def mistakes(
        self, section: str, options: Sequence[str], keys: Mapping[str, str]
    ) -> Iterator[Mistake]:
        """The refused options at their index; ``keys``: option -> key of a section."""
        began = False
        for index, word in enumerate(options):
            place, name = f"{section}.options.{index}", self.name_of(word)
            began |= bool(name)
            if wrong := self._wrong(word, name, began):
                yield Mistake(place, *wrong)
            elif name in keys:
                key = f"{section}.{keys[name]}"
                message = f"option {name} is also set by '{key}'"
                yield Mistake(place, message, "keep one of them", key)

    def _wrong(
        self, word: str, name: str, began: bool
    ) -> tuple[str, str | None] | None:
        hint = "one word per item: -P, project"
        well_formed = "-.+" if self.short else r"-[A-Za-z@]\w*"
        if self.joined:
            hint = "one item for each, like --account=x or -Ax"
            well_formed = r"--[a-z][a-z0-9-]*(?:=.*)?|-[A-Za-z].*"
        if not name and (self.joined or not began):
            return f"{word!r} {_NO_DASH}", hint
        if name and not re.fullmatch(well_formed, word, re.DOTALL):
            return f"{word!r} is not an option", hint
        if why := self._denial(name):
            return f"option {name} is not allowed", why
        if not self.plain.fullmatch(word):
            return f"{word!r} cannot be used in a directive of {self.command}", None
        return None

    def _denial(self, name: str) -> str | None:
        """Why an option is refused. getopt accepts any prefix of a long name."""
        for denied, why in self.denied.items():
            prefix = self.joined and len(name) > 3 and denied.startswith(name)
            if denied == name or prefix:
                return why
        return None


def is_option(word: str) -> bool:
    """Whether a word begins an option; a negative number is a value."""
    return re.match(r"-(?![0-9])", word) is not None


def lines(options: Sequence[str], quoted: Callable[[str], str] = str) -> list[str]:
    """Checked words as directives: an option begins one, and its values follow it."""
    directives: list[list[str]] = []
    for word in options:
        if directives and not is_option(word):
            directives[-1].append(quoted(word))
        else:
            directives.append([quoted(word)])
    return [" ".join(words) for words in directives]

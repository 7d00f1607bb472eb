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


def set_twice(section: str, index: int, option: str, key: str) -> Mistake:
    """The option at this index sets what ``key`` of the section sets, too."""
    message = f"option {option} is also set by '{section}.{key}'"
    place = f"{section}.options.{index}"
    return Mistake(place, message, "keep one of them", f"{section}.{key}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """The options of one command, such as sbatch."""

    command: str
    denied: Mapping[str, str]
    """Option -> why it is refused."""
    plain: re.Pattern[str]
    """What an item has to be so that the command reads it back from a directive."""
    letters: Mapping[str, str] = field(default_factory=dict)
    """Letter of a short option -> long name in ``denied``; for ``joined`` ones."""
    joined: bool = False
    """Whether an option and its value are one item (``--time=1``, ``-t1``); otherwise
    each word is an item (``-l``, ``h_rt=1``)."""
    short: bool = False
    """Whether a word's first letter is the option, the rest its value (``-J1-3``)."""

    def mistakes(self, section: str, options: Sequence[str]) -> Iterator[Mistake]:
        """The refused options of ``section``, each at its index."""
        began = False
        for index, word in enumerate(options):
            found = self._item(word) if self.joined else self._word(word, began)
            began |= word.startswith("-")
            if found is not None:
                yield Mistake(f"{section}.options.{index}", *found)

    @property
    def _hint(self) -> str:
        if self.joined:
            return "one item for each, like --account=x or -Ax"
        return "one word per item: -P, project"

    def _item(self, item: str) -> tuple[str, str | None] | None:
        name = item.partition("=")[0]
        if not item.startswith("-"):
            return f"{item!r} {_NO_DASH}", self._hint
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(?:=.*)?|-[A-Za-z].*", item, re.DOTALL):
            return f"{item!r} is not an option", self._hint
        if why := self._denial(name):
            return f"option {name} is not allowed", why
        return self._unreadable(item)

    def _word(self, word: str, began: bool) -> tuple[str, str | None] | None:
        if re.match(r"-(?![0-9])", word):
            if not re.fullmatch(r"-[A-Za-z@]\w*" if not self.short else "-.+", word):
                return f"{word!r} is not an option", self._hint
            name = word[:2] if self.short else word
            if why := self.denied.get(name):
                return f"option {name} is not allowed", why
            return self._unreadable(word)
        if not began:
            return f"{word!r} {_NO_DASH}", self._hint
        return self._unreadable(word)

    def _unreadable(self, word: str) -> tuple[str, None] | None:
        if self.plain.fullmatch(word):
            return None
        return f"{word!r} cannot be used in a directive of {self.command}", None

    def _denial(self, name: str) -> str | None:
        """Why an option is refused. getopt accepts any prefix of a long name."""
        if not name.startswith("--"):
            long = self.letters.get(name[1:2])
            return None if long is None else self.denied[long]
        for denied, why in self.denied.items():
            if denied == name or (len(name) > 3 and denied.startswith(name)):
                return why
        return None


def lines(options: Sequence[str], quoted: Callable[[str], str] = str) -> list[str]:
    """Checked words as directives: an option begins one, and its values follow it.

    ``quoted`` writes a word as the command reads it.
    """
    found: list[list[str]] = []
    for word in options:
        if found and not re.match(r"-(?![0-9])", word):
            found[-1].append(quoted(word))
        else:
            found.append([quoted(word)])
    return [" ".join(words) for words in found]

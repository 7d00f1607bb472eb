"""Collects the problems of a configuration, each with its place."""

from __future__ import annotations

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.config.tree import Map, Mark, Path, find

MAX_PROBLEMS = 100
"""Further problems are only counted: nobody reads more."""


class Report:
    """Problems, sorted by place: those in the file first, then those in flags."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._problems: list[tuple[Mark, Problem]] = []

    def error(self, mark: Mark, message: str, hint: str | None = None) -> None:
        self._problems.append((mark, Problem(str(mark), message, hint)))

    def warn(self, mark: Mark, message: str, hint: str | None = None) -> None:
        problem = Problem(str(mark), message, hint, warning=True)
        self._problems.append((mark, problem))

    def failed(self, mark: Mark, message: str, hint: str | None = None) -> ConfigError:
        """Note a fatal error; returns a ConfigError with it and all earlier ones."""
        self.error(mark, message, hint)
        return ConfigError(self.errors())

    def check(self) -> None:
        """Raise ConfigError if there are errors; it includes the warnings."""
        if not all(problem.warning for _, problem in self._problems):
            raise ConfigError(self.errors())

    def errors(self) -> tuple[Problem, ...]:
        problems = self._sorted()
        if len(problems) <= MAX_PROBLEMS:
            return problems
        more = len(problems) - MAX_PROBLEMS
        rest = Problem(self.source, f"and {more} more problems")
        return (*problems[:MAX_PROBLEMS], rest)

    def warnings(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self._sorted() if problem.warning)

    def _sorted(self) -> tuple[Problem, ...]:
        def order(placed: tuple[Mark, Problem]) -> tuple[bool, int, int]:
            mark, _ = placed
            return mark.source != self.source, mark.line, mark.column

        ordered = sorted(self._problems, key=order)
        return tuple(dict.fromkeys(problem for _, problem in ordered))


class Findings:
    """A report on one tree that locates problems by path."""

    def __init__(self, root: Map, report: Report) -> None:
        self.root = root
        self.report = report
        self.broken: set[str] = set()
        """Top-level keys with invalid parts, which were left out."""
        self.left_out: dict[Path, set[int]] = {}
        """Path of a list -> indices of its items that were left out."""

    def sound(self, *keys: str) -> bool:
        """Whether nothing was left out below these top-level keys."""
        return self.broken.isdisjoint(keys)

    def is_written(self, key: str) -> bool:
        """Whether this top-level key is present."""
        return key in self.root.entries

    def item(self, path: Path, index: int) -> Path:
        """The path of list item ``index``, not counting items that were left out."""
        for gone in sorted(self.left_out.get(path, ())):
            if gone > index:
                break
            index += 1
        return (*path, index)

    def error(self, path: Path, message: str, hint: str | None = None) -> None:
        self.report.error(self.mark(path), message, hint)

    def warn(self, path: Path, message: str, hint: str | None = None) -> None:
        self.report.warn(self.mark(path), message, hint)

    def mark(self, path: Path) -> Mark:
        """The place of the value at ``path``, or of the deepest value above it."""
        return find(self.root, path).node.mark

    def key_mark(self, path: Path) -> Mark:
        place = find(self.root, path)
        return place.key.mark if place.key else place.node.mark

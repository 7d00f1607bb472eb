"""What a run's record holds about the way to its hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcluster.base.errors import ContactLostError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.model import Description, Host, Interpreter, Ssh


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The part of a Description from which routes are made."""

    hosts: tuple[Host, ...]
    ssh: Ssh
    python: Interpreter
    timeout_given: bool
    """Whether ``connect_timeout`` was configured, and so takes precedence."""

    @classmethod
    def of(cls, description: Description) -> SavedSettings:
        return cls(
            description.hosts,
            description.ssh,
            description.python,
            "ssh.connect_timeout" in description.origins,
        )

    def to_json(self) -> dict[str, Any]:
        saved: dict[str, Any] = to_plain(self)
        return saved

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> SavedSettings:
        """The inverse of ``to_json``. Raises ContactLostError for other input."""
        try:
            saved: SavedSettings = from_plain(cls, found)
        except (KeyError, TypeError, ValueError) as error:
            raise ContactLostError(
                "the record does not say how to reach the hosts",
                hint="their agents stop everything when their lease ends",
            ) from error
        return saved

"""What a run must save to reach its hosts again, as JSON without secrets.

Pure. Saves the Description's settings, not those of ssh_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfcluster.errors import ContactLostError
from tfcluster.model import Description, HostEntry, Interpreter, Ssh

_PATHS = ("identity_file", "config_file", "known_hosts")


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The part of a Description from which routes are made."""

    hosts: tuple[HostEntry, ...]
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
        ssh = asdict(self.ssh)
        for key in _PATHS:
            ssh[key] = None if ssh[key] is None else str(ssh[key])
        return {
            "hosts": [asdict(entry) for entry in self.hosts],
            "ssh": ssh,
            "python": self.python,
            "timeout_given": self.timeout_given,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> SavedSettings:
        """The inverse of ``to_json``. Raises ContactLostError for other input."""
        try:
            ssh = dict(found["ssh"])
            for key in _PATHS:
                ssh[key] = None if ssh[key] is None else Path(ssh[key])
            return cls(
                tuple(map(_host, found["hosts"])),
                Ssh(**ssh),
                _interpreter(found["python"]),
                bool(found["timeout_given"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ContactLostError(
                "the record does not say how to reach the hosts",
                hint="their agents stop everything when their lease ends",
            ) from error


def _host(entry: Mapping[str, Any]) -> HostEntry:
    python = entry.get("python")
    own = None if python is None else _interpreter(python)
    return HostEntry(**{**entry, "python": own})


def _interpreter(value: Any) -> Interpreter:
    """The interpreter; older versions saved a path or a name as text."""
    return (value,) if isinstance(value, str) else tuple(map(str, value))

"""Waits for another task: warns after a while, and gives up in the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tfcluster.runtime import process_group
from tfcluster.runtime.errors import CollectiveTimeoutError
from tfcluster.runtime.telemetry.agent_channel import Waiting, reporter

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass
class WaitPolicy:
    """Defines how long to wait for ``what``, and when to warn."""

    what: str
    warning_s: float | None
    timeout_s: float | None
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _began_s: float = field(init=False)
    _pause_s: float = field(init=False, default=_FIRST_PAUSE_S)
    _warn_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()
        self._warn_s = self.warning_s

    @property
    def left_s(self) -> float | None:
        """Seconds left; None if there is no timeout."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (self.clock() - self._began_s))

    def wait(self) -> None:
        """Pause before a new attempt. Raises CollectiveTimeoutError when time is up."""
        waited_s = self.clock() - self._began_s
        if self.left_s == 0.0:
            raise CollectiveTimeoutError(
                f"{self.what}: given up after {waited_s:.0f} s"
            )
        if self._warn_s is not None and waited_s >= self._warn_s:
            self._warn_s *= 2
            reporter().waiting(Waiting(waited_s, self.what))
            sys.stderr.write(f"tfcluster: {self.what}, for {waited_s:.0f} s now\n")
        self.pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def wait_policy(what: str) -> WaitPolicy:
    """The policy of ``runtime.stall_warning`` and ``runtime.stall_timeout``."""
    options = process_group.context().options
    return WaitPolicy(what, options.stall_warning_s, options.stall_timeout_s)

"""The agent's own exit codes; ``docs/protocols.md`` explains them."""

from __future__ import annotations

CLOSED = 0
LEASE_ENDED = 10
FAULT = 11
AGENT_DIED = 12
TERMINATED = 143

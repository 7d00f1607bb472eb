"""A host's firewall for ports: lose what comes to them, or refuse it. Needs nft."""

from __future__ import annotations

from tests.testbed import packages
from tests.testbed.commands import check, run
from tests.testbed.namespaces import Where

_TABLE = "inet rig"


class Firewall:
    """What comes in for some TCP ports (``40000`` or ``40000-41000``) of a host."""

    def __init__(self, host: Where) -> None:
        self._host = host

    def drop(self, ports: str) -> None:
        """Answer nothing."""
        self._rule(ports, "drop")

    def reject(self, ports: str) -> None:
        """Answer that nobody listens."""
        self._rule(ports, "reject with tcp reset")

    def open(self) -> None:
        """Undo all of this."""
        run(self._host().enter_network("nft", "delete", "table", *_TABLE.split()))

    def _rule(self, ports: str, verdict: str) -> None:
        packages.require(("nft",))
        chain = "type filter hook input priority 0; policy accept;"
        text = (
            f"add table {_TABLE}\n"
            f"add chain {_TABLE} input {{ {chain} }}\n"
            f"add rule {_TABLE} input tcp dport {ports} {verdict}\n"
        )
        check(self._host().enter_network("nft", "-f", "-"), stdin=text)

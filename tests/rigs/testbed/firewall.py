"""A host's firewall, which drops or rejects packets to ports. Needs nft."""

from __future__ import annotations

from tests.rigs.testbed import packages
from tests.rigs.testbed.commands import check, run
from tests.rigs.testbed.namespaces import Where

_TABLE = "inet rig"


class Firewall:
    """Rules for packets to TCP ports of a host (``40000`` or ``40000-41000``)."""

    def __init__(self, host: Where) -> None:
        self._host = host

    def drop(self, ports: str) -> None:
        """Drop packets without an answer."""
        self._rule(ports, "drop")

    def reject(self, ports: str) -> None:
        """Refuse connections, as a port without a listener does."""
        self._rule(ports, "reject with tcp reset")

    def open(self) -> None:
        """Remove all rules."""
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

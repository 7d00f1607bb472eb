"""Fetches results after the run is over, through new agents on its hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tfcluster.base.errors import TfclusterError
from tfcluster.launcher.agent_connection import Closed, Received, Unopened
from tfcluster.launcher.brief_contacts import BriefContacts, Item
from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
    run_all,
)
from tfcluster.launcher.results import AT_ONCE
from tfcluster.launcher.workdir_listing import witnesses
from tfcluster.plan.model import Description, Host
from tfcluster.protocol.messages import Fault, ResultsMessage
from tfcluster.schedulers.starting import Starter

_SHOW_S = 0.1


def fetch_late(
    description: Description,
    hosts: Sequence[Host],
    starter: Starter,
    patterns: tuple[str, ...],
    *,
    apart: bool,
    force: bool,
    show: Callable[[Mapping[str, TransferOutcome]], None],
) -> list[tuple[TransferOutcome, TfclusterError | None]]:
    """Fetch from hosts whose run is over; an error says why a host was not reached.

    ``show`` is called now and then with the outcomes so far.
    """
    root, sync = description.workdir, description.sync
    folder = str(root) if sync is None else sync.folder
    wanted = WantedFiles(folder, witnesses(root), patterns)
    outcomes = {host.name: TransferOutcome(host.name) for host in hosts}
    inboxes = {host.name: Inbox() for host in hosts}
    # The agents are not of the run: they must not end any of its processes that are
    # left.
    contacts = BriefContacts(starter, "fetch")
    try:
        errors = _open(contacts, hosts, inboxes)
        transfers = [
            HostTransfer(
                outcomes[name],
                wanted,
                ResultFolder(root, name, force=force, apart=apart),
                send=partial(contacts.send, name),
                inbox=inboxes[name],
            )
            for name in outcomes
            if errors[name] is None
        ]
        act = partial(run_all, transfers, AT_ONCE)
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        shown_s = 0.0
        while thread.is_alive():
            _handle(contacts.next(_SHOW_S), inboxes, errors)
            if time.monotonic() - shown_s >= _SHOW_S:
                show(outcomes)
                shown_s = time.monotonic()
    finally:
        contacts.close()
    for name, error in errors.items():
        if error is not None:
            outcomes[name].cause, outcomes[name].over = error.message, True
    return [(outcome, errors[name]) for name, outcome in outcomes.items()]


def _open(
    contacts: BriefContacts, hosts: Sequence[Host], inboxes: Mapping[str, Inbox]
) -> dict[str, TfclusterError | None]:
    """Start agents on hosts; returns why this failed, and None where it did not."""
    errors: dict[str, TfclusterError | None] = {}
    contacts.open(hosts)
    while len(errors) < len(hosts):
        _handle(contacts.next(_SHOW_S), inboxes, errors)
    return errors


def _handle(
    item: Item | None,
    inboxes: Mapping[str, Inbox],
    errors: dict[str, TfclusterError | None],
) -> None:
    """Pass an item on to the inbox of its host, or note whether its agent started."""
    if isinstance(item, Closed):
        inboxes[item.host].end(item.cause)
    elif isinstance(item, Received):
        if isinstance(item.message, ResultsMessage):
            inboxes[item.host].put(item.message)
        elif isinstance(item.message, Fault):
            inboxes[item.host].end(item.message.cause)
    elif isinstance(item, Unopened):
        errors[item.host] = item.error
    elif item is not None:
        errors[item.host] = None

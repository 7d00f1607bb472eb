"""Copies the workdir's files to each host that does not share them."""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.launcher.workdir_listing import Listing
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.messages import Synced, Wants
from tfcluster.protocol.requests import Request


class WorkdirSender:
    """Copies ``files``, if any, to hosts; ``send`` sends a request to a host."""

    def __init__(
        self, files: Listing | None, send: Callable[[str, Request], None]
    ) -> None:
        self._files = files
        self._send = send
        self._busy: set[str] = set()
        self._cwd: dict[str, str] = {}

    def begin(self, host: str) -> None:
        """Send a host the list; the host then asks for the files that it lacks."""
        if self._files is not None:
            self._busy.add(host)
            for request in self._files.sync_requests():
                self._send(host, request)

    def busy(self, host: str) -> bool:
        return host in self._busy

    def wants(self, host: str, wanted: Wants) -> None:
        """Send the parts that a host asks for. Raises ProtocolError for others."""
        if self._files is None:
            raise ProtocolError("no files are to be copied")
        try:
            for index, offset, length in wanted.parts:
                self._send(host, self._files.part(index, offset, length))
        except (IndexError, OverflowError) as error:
            raise ProtocolError(f"these parts do not exist: {wanted.parts}") from error

    def synced(self, host: str, synced: Synced) -> None:
        """Note that a host has all files, and where."""
        self._busy.discard(host)
        self._cwd[host] = synced.cwd

    def cwd(self, host: str, planned: str) -> str:
        """The working directory on a host: ``planned``, unless the host has copies."""
        return self._cwd.get(host, planned)

    def has_copy(self, host: str) -> bool | None:
        """Whether a host works on a copy of the files; None: nothing was copied."""
        if self._files is None or host not in self._cwd:
            return None
        return self._cwd[host] != str(self._files.root)

    def copies(self) -> dict[str, list[str]]:
        """Folder -> the hosts that have copies in it."""
        found: dict[str, list[str]] = {}
        for host, cwd in self._cwd.items():
            if self.has_copy(host):
                found.setdefault(cwd, []).append(host)
        return found

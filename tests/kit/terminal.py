"""A real terminal on which a launch is started, and its user."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading

from tests.kit.cluster import DEADLINE_S, Cluster, Running
from tests.kit.waiting import eventually

_TOKENS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b|.|\n", re.DOTALL)
CTRL_C = b"\x03"


class Terminal:
    """A pseudo-terminal with a reader thread that records what is written to it."""

    def __init__(
        self, columns: int = 80, lines: int = 24, *, read: bool = True
    ) -> None:
        self.columns = columns
        self._ours, self._theirs = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, size)
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        if read:
            self._reader.start()

    def launch(self, cluster: Cluster, *words: str, **environ: str) -> Running:
        """Start ``tfcluster launch`` as the terminal's foreground job."""

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        running = cluster.start(
            *words,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            prepare=take_terminal,
            environ={"TERM": "xterm", **environ},
        )
        os.close(self._theirs)
        eventually(
            lambda: cluster.run_ids() or running.process.poll() is not None,
            lambda: f"no run: {self.text}",
            DEADLINE_S,
        )
        running.adopt(cluster.run_ids()[-1])
        return running

    @property
    def text(self) -> str:
        """Everything that was written, unprocessed."""
        return bytes(self._data).decode(errors="surrogateescape")

    def wait_for(self, text: str) -> None:
        eventually(lambda: text in self.text, lambda: repr(self.text), DEADLINE_S)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def hang_up(self) -> None:
        """Close the terminal's window."""
        # The reader's blocking read would keep our end open, so put another file in its
        # place.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self._ours)
        os.close(nothing)

    def rows(self) -> list[str]:
        """Return all rows that the user can see, including those scrolled away."""
        return shown(self.text, self.columns)

    def close(self) -> None:
        """Wait for the last output of a launch that has ended, and close our end."""
        if self._reader.is_alive():
            self._reader.join(DEADLINE_S)
        os.close(self._ours)

    def _read(self) -> None:
        try:
            while data := os.read(self._ours, 1 << 16):
                self._data += data
        except OSError:
            pass  # EIO: no process has the other end open any more


def shown(text: str, columns: int) -> list[str]:
    """Return a terminal's rows after ``text``: wraps, moves up, erases; no colours."""
    rows, row, column = [""], 0, 0
    for token in _TOKENS.findall(text):
        if token == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            rows[row] = rows[row][:column]
        elif token == "\x1b[A":
            row = max(0, row - 1)
        elif token.startswith("\x1b["):
            assert token.endswith("m"), token
        else:
            assert token.isprintable(), repr(token)
            if column == columns:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            before = rows[row][:column].ljust(column)
            rows[row] = before + token + rows[row][column + 1 :]
            column += 1
    return rows

"""Why a task ended, in one sentence: from exit code, signal and last output. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIGNALS = {
    "SIGKILL": "killed by SIGKILL",
    "SIGTERM": "ended by SIGTERM",
    "SIGINT": "ended by SIGINT",
    "SIGHUP": "ended by SIGHUP",
    "SIGSEGV": "crashed with SIGSEGV (segmentation fault)",
    "SIGBUS": "crashed with SIGBUS (bad memory access, or a full /dev/shm)",
    "SIGABRT": "aborted (SIGABRT)",
    "SIGILL": "crashed with SIGILL (an instruction that this CPU lacks)",
    "SIGFPE": "crashed with SIGFPE (arithmetic error)",
    "SIGXCPU": "ran over its CPU time limit (SIGXCPU)",
}

# The last line of a traceback: a dotted class name, perhaps with a message.
_EXCEPTION = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?")
_ADDRESS = re.compile(r"address already in use|could not start grpc server", re.I)
# Output of a task that failed only because one of its peers did.
_VICTIM = re.compile(
    r"PeerLostError|UnavailableError|Connection reset by peer|Socket closed|"
    r"failed to connect to all addresses|coordination service|Broken pipe|"
    r"heartbeat timeout",
    re.I,
)
_MAX_CHARS = 300


def cause_of_exit(
    *, code: int | None, signal: str | None, oom: bool, tail: Sequence[str]
) -> str | None:
    """One sentence; None if the task ended well. ``tail`` has its last output lines."""
    if signal is not None:
        text = _SIGNALS.get(signal, f"killed by {signal}")
        if oom:
            return f"{text}: out of memory (the kernel's OOM killer)"
        reason = _abort_reason(tail) if signal == "SIGABRT" else None
        return f"{text}: {reason}" if reason else text
    if code == 0:
        return None
    error = last_words(tail)
    if code == 127 and error is None:
        return "exited with code 127 (command not found?)"
    return error or f"exited with code {code}"


def last_words(tail: Sequence[str]) -> str | None:
    """The last exception (or known error message) in these last lines of output."""
    for line in reversed(tail):
        text = line.strip()
        if _ADDRESS.search(text):
            return _cut(f"address in use: {text}")
        if _EXCEPTION.fullmatch(text) and not line[:1].isspace():
            return _cut(text)
    return None


def looks_like_victim(cause: str | None, tail: Sequence[str]) -> bool:
    """Whether the task seems to have failed because another one had."""
    last = last_words(tail)
    return any(text and _VICTIM.search(text) for text in (cause, last))


def _abort_reason(tail: Sequence[str]) -> str | None:
    """The line that says why a C++ program aborted."""
    for line in reversed(tail):
        if "Check failed" in line or line.startswith(("F0", "terminate called")):
            return _cut(line.strip())
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"

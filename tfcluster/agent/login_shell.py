"""Makes the command of a login shell that runs setup lines, and parses its answer.

The answer is the environment that the lines leave. Starts no process.
"""

from __future__ import annotations

from tfcluster.light_dataclasses import dataclass

# Arguments: the descriptor of a file with the lines, and of one for the answer. Both
# are files without a name, so that neither the lines nor the environment appear in an
# argument. The trap reports a failed command of the lines themselves, but not one in a
# file that they source: conda's, for example, tries commands that may fail.
_DRIVER = r"""
tfcluster_lines=/dev/fd/$1 tfcluster_answer=$2
set --
tfcluster_before=$(type -P python || type -P python3 || :)
tfcluster_failed() {
  if [[ ${BASH_SOURCE[1]} == "$tfcluster_lines" ]]; then
    printf 'failed\0%s\0%s\0' "$1" "$2" >&"$tfcluster_answer"
    exit 1
  fi
}
trap 'tfcluster_failed "$LINENO" "$?"' ERR
. "$tfcluster_lines"
tfcluster_status=$?
trap - ERR
if [[ $tfcluster_status != 0 && -z ${tfcluster_reached_end-} ]]; then
  printf 'unread\0%s\0' "$tfcluster_status" >&"$tfcluster_answer"
  exit 1
fi
tfcluster_after=$(type -P python || type -P python3 || :)
printf 'done\0%s\0%s\0' "$tfcluster_before" "$tfcluster_after" >&"$tfcluster_answer"
exec "$BASH" --norc --noprofile -p -c '
while IFS= read -r -d "" entry; do
  printf "%s\0" "$entry"
done < /proc/self/environ' >&"$tfcluster_answer"
"""
_LAST_LINE = "\ntfcluster_reached_end=1\n"
_OF_THE_SHELL = (b"_", b"SHLVL", b"PWD", b"OLDPWD")


@dataclass(frozen=True, slots=True)
class Captured:
    """The environment after the last line."""

    env: dict[bytes, bytes]
    python: str | None
    """The first Python on the PATH, if the lines changed it."""


@dataclass(frozen=True, slots=True)
class LineFailed:
    """A line failed; ``line`` counts from 1, or is None if it is unknown."""

    line: int | None
    cause: str


def shell_argv(lines: int, answer: int) -> tuple[str, ...]:
    """The login shell's command; the arguments are descriptors that it inherits."""
    return ("bash", "--login", "-c", _DRIVER, "tfcluster", str(lines), str(answer))


def shell_input(text: str) -> bytes:
    """The content of the file with the lines."""
    return (text + _LAST_LINE).encode("utf-8", "surrogateescape")


def parse_answer(answer: bytes, exit_words: str) -> Captured | LineFailed:
    """What the shell wrote; ``exit_words`` says how it ended."""
    kind, _, rest = answer.partition(b"\0")
    if kind == b"failed":
        line, status, _ = rest.split(b"\0", 2)
        return LineFailed(int(line), f"failed with exit status {int(status)}")
    if kind == b"unread":
        status = rest.partition(b"\0")[0]
        return LineFailed(None, f"were not read to their end (status {int(status)})")
    if kind != b"done" or not rest.endswith(b"\0"):
        where = "the lines" if answer else "the lines or the login profile"
        return LineFailed(None, f"ended early: {where} ended the shell, {exit_words}")
    before, after, entries = rest.split(b"\0", 2)
    env = {
        name: value
        for name, equals, value in (e.partition(b"=") for e in entries.split(b"\0"))
        if equals and name not in _OF_THE_SHELL
    }
    changed = after if after != before else b""
    return Captured(env, changed.decode("utf-8", "surrogateescape") or None)

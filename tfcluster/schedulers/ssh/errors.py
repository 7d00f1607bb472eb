"""Error messages, with hints, for what can fail on the way to a host's agent.

Pure: turns exceptions and facts into errors. Does not know paramiko.
"""

from __future__ import annotations

import errno
import re
import shlex
import socket
from collections.abc import Sequence
from enum import Enum

from tfcluster.base.errors import HostError, StartError, TfclusterError
from tfcluster.schedulers.agent_bundle import OWN_WORDS
from tfcluster.schedulers.ssh.known_hosts import HostKey
from tfcluster.schedulers.ssh.route import Route, key_name

_NOT_FOUND = re.compile(r"not found|no such file", re.IGNORECASE)
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_CANNOT_EXECUTE, _NO_COMMAND, _CSH_FAILED = 126, 127, 1


class SshStage(Enum):
    """How far a connection has come; the value is the last completed step."""

    NOTHING = ""
    TCP = "tcp"
    BANNER = "banner"
    KEYS = "key exchange"
    AUTH = "auth"


def unreachable(route: Route, error: OSError) -> HostError:
    """The error that there is no TCP connection."""
    where = f"{_who(route)} port {route.port}"
    if isinstance(error, socket.gaierror):
        return HostError(
            f"{route.name}: the name {route.hostname} does not resolve",
            hint="check the name, or give it a HostName in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError):
        return HostError(
            f"{route.name}: no answer from {where} within {route.timeout_s:g} s",
            hint="is it up? does a firewall drop the connection?",
        )
    if error.errno == errno.ECONNREFUSED:
        return HostError(
            f"{route.name}: {where} refused the connection",
            hint="is sshd running there, and on this port?",
        )
    if error.errno in _NO_ROUTE:
        return HostError(f"{route.name}: there is no route to {where}")
    return HostError(f"{route.name}: cannot connect to {where}: {error}")


def stuck(route: Route, stage: SshStage) -> HostError:
    """The error that the host sent nothing more after we connected."""
    return HostError(
        f"{route.name}: {_who(route)} port {route.port} sent nothing for "
        f"{route.timeout_s:g} s (stuck after: {stage.value})"
    )


def dropped(route: Route, stage: SshStage, cause: str, attempts: int) -> HostError:
    """The error that the host ended the connection on every attempt."""
    times = f", {attempts} times" if attempts > 1 else ""
    hint = None
    if stage is SshStage.TCP:
        hint = "too many connections at once? see MaxStartups in its sshd_config"
    return HostError(
        f"{route.name}: {_who(route)} port {route.port} ended the connection after "
        f"{stage.value}{times}: {cause}",
        hint=hint,
    )


def proxy_ended(route: Route, cause: str) -> HostError:
    return HostError(
        f"{route.name}: its ProxyCommand did not connect: {cause}",
        hint=f"try it: {route.proxy_command}",
    )


def no_jump(route: Route, via: Route, cause: str) -> HostError:
    return HostError(
        f"{route.name}: {via.name} cannot connect to {route.hostname} "
        f"port {route.port}: {cause}"
    )


def unknown_key(route: Route, key: HostKey) -> HostError:
    file = shlex.quote(str(route.known_hosts[0])) if route.known_hosts else "FILE"
    port = f" -p {route.port}" if route.port != 22 else ""
    alias = route.key_name != key_name(route.hostname, route.port)
    if route.via or route.proxy_command or alias:
        user = f"{shlex.quote(route.user)}@"
        add = f"log in once by hand: ssh{port} {user}{route.name}"
    else:
        scan = f"ssh-keyscan{port} -t {key.algorithm} {route.hostname}"
        add = f"add it: {scan} >> {file}"
    return HostError(
        f"{route.name}: its host key is unknown: {key}",
        hint="compare this with the output of `ssh-keygen -lf "
        f"/etc/ssh/ssh_host_{key.algorithm}_key.pub` on the host itself, then {add}",
    )


def changed_key(route: Route, key: HostKey, listed: HostKey) -> HostError:
    file = listed.where.rpartition(":")[0]
    return HostError(
        f"{route.name}: POSSIBLE ATTACK: its host key is {key}, but {listed.where} has "
        f"{listed}; someone may be intercepting the connection",
        hint="ask the administrator of the host; only if the key was changed on "
        f"purpose, remove the old one: ssh-keygen -R {shlex.quote(route.key_name)} "
        f"-f {shlex.quote(file)}",
    )


def revoked_key(route: Route, key: HostKey, listed: HostKey) -> HostError:
    return HostError(
        f"{route.name}: POSSIBLE ATTACK: its host key {key} is revoked "
        f"in {listed.where}",
        hint="ask the administrator of the host",
    )


def denied(
    route: Route,
    *,
    accepted: Sequence[str] = (),
    refused: Sequence[str] = (),
    locked: Sequence[str] = (),
    unusable: Sequence[str] = (),
) -> HostError:
    """The error that authentication failed.

    ``accepted``: methods that the host offers; ``refused``: keys that were offered, by
    display name; ``locked``: key files with a passphrase; ``unusable``: other key
    files, and why.
    """
    ways = f" ({','.join(accepted)})" if accepted else ""
    parts = [f"{route.name}: Permission denied{ways} as user {route.user}"]
    if refused:
        parts.append("tried " + ", ".join(refused))
    elif not locked:
        parts.append("no key was available")
    parts += [f"{name} needs a passphrase" for name in locked]
    parts += unusable
    hint = "is this the right user? is the key in its ~/.ssh/authorized_keys?"
    if locked:
        hint = f"ssh-add {shlex.quote(locked[0])}"
    elif accepted and "publickey" not in accepted:
        hint = "tfcluster logs in only with keys; ask for publickey to be allowed"
    elif not refused:
        hint = "make one with ssh-keygen, or set 'identity_file' under 'ssh'"
    return HostError("; ".join(parts), hint=hint)


def no_session(route: Route, cause: str) -> HostError:
    return HostError(
        f"{route.name}: logged in as {route.user}, but it does not permit running "
        f"commands: {cause}"
    )


def no_agent(python: str, status: int | None, words: str) -> TfclusterError | None:
    """Why no agent could start, if the shell's exit status or stderr says so."""
    last = words.splitlines()[-1].strip() if words else ""
    if last.startswith(OWN_WORDS):
        return None  # the interpreter ran
    words_of_shell = f": {last[:200]}" if last else ""
    if status == _NO_COMMAND or (status == _CSH_FAILED and _NOT_FOUND.search(last)):
        return StartError(
            f"{python} does not exist{words_of_shell}",
            hint="set 'python' to the interpreter that the hosts have",
        )
    if status == _CANNOT_EXECUTE:
        return StartError(f"{python} cannot be executed{words_of_shell}")
    if "Unknown option: -I" in words:
        return StartError(
            f"{python} is too old; tfcluster needs Python 3.10",
            hint="set 'python' to another interpreter",
        )
    return None


def ended(status: int | None, words: Sequence[str]) -> str:
    """How the remote program ended, with its last line of stderr."""
    end = "" if status is None else f"exit status {status}"
    last = words[-1][:300] if words else ""
    return ": ".join(part for part in (end, last) if part)


def _who(route: Route) -> str:
    same = route.hostname == route.name
    return route.name if same else f"{route.name} ({route.hostname})"

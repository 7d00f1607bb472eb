"""How to reach a host: combines cluster.yaml and ssh_config into a frozen Route.

Pure. Precedence: the host's entry in cluster.yaml, its ``ssh`` section, ssh_config,
ssh's defaults.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tfcluster.base.errors import HostError
from tfcluster.plan.host_patterns import host_name_problem
from tfcluster.plan.model import Host, Ssh
from tfcluster.schedulers.ssh.config import Directive, Options, lookup

MAX_JUMPS = 8
_MAX_DIGITS = 9
DEFAULT_PORT = 22
CONNECT_TIMEOUT_S = 10.0

# As in cluster.yaml, a whitelist: a name that begins with '-' would be an option.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*\$?")
_KEY_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")
_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Everything that is needed to connect to a host; nothing is secret."""

    name: str
    """The host's name in the configuration."""
    hostname: str
    port: int
    user: str
    key_name: str
    """Its name in known_hosts: ``HostKeyAlias``, or name and port."""
    known_hosts: tuple[Path, ...]
    identities: tuple[Path, ...]
    """Private keys, in the order in which they are tried."""
    certificates: tuple[Path, ...] = ()
    identities_only: bool = False
    """Whether to use only the listed keys of the ssh agent."""
    uses_agent: bool = True
    proxy_command: str | None = None
    """The command for a shell, with all tokens expanded."""
    via: Route | None = None
    """The route to the jump host."""
    timeout_s: float = CONNECT_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The configuration from which routes are made."""

    directives: tuple[Directive, ...]
    ssh: Ssh
    timeout_given: bool
    """Whether cluster.yaml sets ``connect_timeout``, which then takes precedence."""
    home: Path
    me: str
    """The local user."""


def route(host: Host, sources: Sources) -> Route:
    """The route to a host. Raises HostError for invalid or unsupported settings."""
    user, port = host.user or sources.ssh.user, host.port or sources.ssh.port
    hop = Host(name=host.own_name, user=user, port=port)
    return _route(hop, sources, before=None, depth=0)


def _route(hop: Host, sources: Sources, before: Route | None, depth: int) -> Route:
    if depth > MAX_JUMPS:
        raise HostError(f"{hop.name}: more than {MAX_JUMPS} jump hosts")
    if problem := host_name_problem(hop.name):
        raise HostError(f"{hop.name[:60]!r} {problem}")
    options = lookup(sources.directives, hop.name, me=sources.me)
    user = hop.user or _one(options, "user") or sources.me
    if not _USER.fullmatch(user):
        raise HostError(f"{hop.name}: {user[:60]!r} is not a user name")
    hostname = _hostname(hop.name, options)
    port = hop.port or _port(options, hop.name)
    tokens = {
        "%": "%",
        "h": hostname,
        "n": hop.name,
        "p": str(port),
        "r": user,
        "u": sources.me,
        "d": str(sources.home),
    }

    def paths(words: Iterable[str]) -> tuple[Path, ...]:
        names = (_filled(word, tokens, hop.name) for word in words if word != "none")
        return tuple(_path(name, sources.home) for name in names)

    alias = _one(options, "hostkeyalias")
    if before is None:
        before = _jumps(options, sources, hop.name, depth)
    command = None if before else _proxy_command(options, tokens, hop.name)
    return Route(
        name=hop.name,
        hostname=hostname,
        port=port,
        user=user,
        key_name=alias or key_name(hostname, port),
        known_hosts=_known_hosts(options, sources.ssh, paths),
        identities=_identities(options, sources, paths),
        certificates=paths(options.get("certificatefile", ())),
        identities_only=_one(options, "identitiesonly") == "yes",
        uses_agent=_one(options, "identityagent") != "none",
        proxy_command=command,
        via=before,
        timeout_s=_timeout_s(options, sources, hop.name),
    )


def key_name(hostname: str, port: int) -> str:
    """The name of a host in known_hosts: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT."""
    name = hostname.lower()
    return name if port == DEFAULT_PORT else f"[{name}]:{port}"


def _one(options: Options, key: str) -> str | None:
    values = options.get(key)
    return values[0] if values else None


def _hostname(host: str, options: Options) -> str:
    hostname = _filled(_one(options, "hostname") or "%h", {"%": "%", "h": host}, host)
    if problem := host_name_problem(hostname):
        raise HostError(f"{host}: HostName {hostname[:60]!r} {problem}")
    return hostname


def _port(options: Options, host: str) -> int:
    text = _one(options, "port") or str(DEFAULT_PORT)
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) <= 65535:
        raise HostError(f"{host}: Port {text[:20]!r} is not a port")
    return int(text)


def _timeout_s(options: Options, sources: Sources, host: str) -> float:
    text = _one(options, "connecttimeout")
    if sources.timeout_given or text is None or text == "none":
        return sources.ssh.connect_timeout_s
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) == 0:
        raise HostError(f"{host}: ConnectTimeout {text[:20]!r} is not a time")
    return float(text)


def _proxy_command(options: Options, tokens: dict[str, str], host: str) -> str | None:
    text = _one(options, "proxycommand")
    if text is None or text.lower() == "none":
        return None
    # A shell parses the command; each expanded token stays one word.
    quoted = {key: shlex.quote(value) for key, value in tokens.items() if key != "%"}
    return _filled(text, {"%": "%", **quoted}, host)


def _jumps(options: Options, sources: Sources, host: str, depth: int) -> Route | None:
    """The route to the last jump host; the first one may itself need jumps."""
    text = _one(options, "proxyjump")
    if text is None or text.lower() == "none":
        return None
    # ProxyJump and ProxyCommand compete: whichever is specified first wins.
    order = [name for name in options if name in ("proxyjump", "proxycommand")]
    if order[0] == "proxycommand":
        return None
    last: Route | None = None
    for number, word in enumerate(text.split(","), 1):
        last = _route(_hop(word.strip(), host), sources, last, depth + number)
    return last


def _hop(word: str, host: str) -> Host:
    """Parse ``[ssh://][user@]host[:port]``. Raises HostError."""
    text = word.removeprefix("ssh://")
    user, at, rest = text.rpartition("@")
    match = re.fullmatch(r"\[([^\[\]]+)\](?::(\d{1,5}))?|([^:]+)(?::(\d{1,5}))?", rest)
    if match is None or (at and not user):
        raise HostError(f"{host}: ProxyJump {word[:60]!r} is not [USER@]HOST[:PORT]")
    port = match[2] or match[4]
    name = match[1] or match[3]
    return Host(name=name, user=user or None, port=int(port) if port else None)


_Paths = Callable[[Iterable[str]], tuple[Path, ...]]
"""Expands file names of ssh_config."""


def _known_hosts(options: Options, ssh: Ssh, paths: _Paths) -> tuple[Path, ...]:
    if ssh.known_hosts is not None:
        return (ssh.known_hosts,)
    own = _one(options, "userknownhostsfile") or _KNOWN_HOSTS
    everybody = _one(options, "globalknownhostsfile") or _GLOBAL_KNOWN_HOSTS
    return paths([*own.split(), *everybody.split()])


def _identities(options: Options, sources: Sources, paths: _Paths) -> tuple[Path, ...]:
    listed = options.get("identityfile", ())
    if sources.ssh.identity_file is not None:
        return (sources.ssh.identity_file, *paths(listed))
    if listed:
        return paths(listed)
    return tuple(sources.home / ".ssh" / name for name in _KEY_FILES)


def _path(name: str, home: Path) -> Path:
    if name == "~" or name.startswith("~/"):
        return home / name[2:]
    return home / ".ssh" / name  # an absolute name replaces the folder


def _filled(text: str, tokens: dict[str, str], host: str) -> str:
    """``text`` with its %-tokens expanded. Raises HostError for an unknown one."""

    def token(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise HostError(f"{host}: {match[0]} in {text[:60]!r} cannot be expanded")
        return tokens[match[1]]

    return re.sub("%(.?)", token, text)

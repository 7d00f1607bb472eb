"""ssh_config and known_hosts."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

from tests.fuzz.target import Target
from tests.fuzz.targets.text import bytes_of, text_of
from tfcluster.base.errors import HostError
from tfcluster.plan.model import Host, Ssh
from tfcluster.schedulers.ssh import config, known_hosts, route

_HOSTS = ("gpu7", "login.example.org", "10.0.0.7")


def _config(data: bytes) -> None:
    texts = text_of(data).split("\n---\n")

    def read(pattern: str) -> list[tuple[str, str]]:
        return [(f"{pattern}", text) for text in texts[1:3]]

    directives = config.parse("config", texts[0], read)
    for host in _HOSTS:
        options = config.lookup(directives, host, me="ann")
        assert all(isinstance(value, tuple) for value in options.values())
        _check(_route(directives, host), depth=0)


def _route(directives: tuple[config.Directive, ...], host: str) -> route.Route:
    sources = route.Sources(
        directives=directives,
        ssh=Ssh(),
        timeout_given=False,
        home=Path("/home/ann"),
        me="ann",
    )
    return route.route(Host(name=host), sources)


def _check(found: route.Route, depth: int) -> None:
    """A socket takes its numbers, and the system its names."""
    assert depth <= 2 * route.MAX_JUMPS
    assert 1 <= found.port <= 65535
    assert 0 < found.timeout_s < 1e9
    assert not found.hostname.startswith("-")
    assert not found.user.startswith("-")
    for path in (*found.identities, *found.certificates, *found.known_hosts):
        assert "\0" not in str(path)
    if found.via:
        _check(found.via, depth + 1)


def _known_hosts(data: bytes) -> None:
    text = text_of(data)
    for name in (*_HOSTS, "[gpu7]:2222"):
        keys = known_hosts.listed_keys([("known_hosts", text)], name)
        for key in keys:
            assert known_hosts.fingerprint(key.blob).startswith("SHA256:")


def _hashed(name: str) -> str:
    salt = bytes(20)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return "|".join(("", "1", *(base64.b64encode(x).decode() for x in (salt, digest))))


_KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519" + bytes(36)).decode()
_CONFIG = """\
Include other
Host gpu* !gpu9
    HostName %h.example.org
    Port 2222
    User bob
    IdentityFile "~/.ssh/my key"
Match host *.org user bob exec "true"
    ProxyJump a@b:22,c
Match final all
    ProxyCommand ssh -W %h:%p gate
Match originalhost gpu7 localuser ann
    ConnectTimeout=10
Host *
    UserKnownHostsFile ~/.ssh/known_hosts /x
"""

TARGETS = (
    Target(
        "ssh-config",
        _config,
        lambda: bytes_of(
            _CONFIG,
            _CONFIG.replace(' exec "true"', "")
            + "\n---\nHost x\nPort 1\n---\nUser c\n",
            "Match !canonical all\nPort = 22\n",
        ),
        (HostError,),
        (b"Host ", b"\nMatch ", b"Include x\n", b"\n---\n", b"*a", b"?", b"!", b'"'),
    ),
    Target(
        "known-hosts",
        _known_hosts,
        lambda: bytes_of(
            f"gpu7,10.0.0.7 ssh-ed25519 {_KEY} comment\n"
            f"@revoked * ssh-ed25519 {_KEY}\n@cert-authority *.org ssh-rsa {_KEY}\n",
            f"{_hashed('gpu7')} ssh-ed25519 {_KEY}\n[gpu7]:2222 ssh-rsa {_KEY}\n",
            f"*.org,!x ssh-ed25519 {_KEY}\n# a comment\n",
        ),
        (),
        (b"|1|", b"@revoked ", b"*a", b"?", _KEY.encode(), b" ssh-rsa "),
    ),
)

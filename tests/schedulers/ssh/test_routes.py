"""Routes from ssh_config and cluster.yaml, compared with ssh if it is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tfcluster.base.errors import HostError
from tfcluster.plan.model import Host, Ssh
from tfcluster.schedulers.ssh.config import Options, lookup, parse
from tfcluster.schedulers.ssh.route import Route, Sources, key_name, route

HOME = Path("/home/u")

CONFIG = """\
# a comment
Host plain # and one here
  HostName 10.0.0.1
Host = quoted "with space"
  User "john"
Host node* !node9
  User worker
  Port=2222
  IdentityFile ~/.ssh/first
Host node1
  User late
  IdentityFile ~/.ssh/second
Match host 10.0.0.1 user root
  Port 77
Match originalhost matched !localuser nobody
  HostName %h.example.org
  HostKeyAlias other
Host [ab]x
  Port 99
Host *
  ConnectTimeout 4
  User everybody
"""


def _sources(text: str = "", ssh: Ssh | None = None, *, given: bool = False) -> Sources:
    return Sources(
        directives=parse("config", text, lambda pattern: ()),
        ssh=ssh or Ssh(),
        timeout_given=given,
        home=HOME,
        me="me",
    )


def _route(host: str, text: str = "", ssh: Ssh | None = None) -> Route:
    return route(Host(name=host), _sources(text, ssh))


def _options(host: str, text: str) -> Options:
    return lookup(parse("config", text, lambda pattern: ()), host, me="me")


@pytest.mark.parametrize(
    ("host", "hostname", "user", "port"),
    [
        ("plain", "10.0.0.1", "everybody", 22),
        ("quoted", "quoted", "john", 22),
        ("node1", "node1", "worker", 2222),
        ("node9", "node9", "everybody", 22),
        ("matched", "matched.example.org", "everybody", 22),
        ("ax", "ax", "everybody", 22),
    ],
)
def test_the_first_value_that_applies_wins(
    host: str, hostname: str, user: str, port: int
) -> None:
    found = _route(host, CONFIG)
    assert (found.hostname, found.user, found.port) == (hostname, user, port)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@pytest.mark.parametrize(
    "host", ["plain", "quoted", "node1", "node9", "matched", "ax", "PLAIN", "Node1"]
)
def test_ssh_itself_reads_the_same(tmp_path: Path, host: str) -> None:
    path = tmp_path / "config"
    path.write_text(CONFIG)
    argv = ["ssh", "-F", str(path), "-G", "--", host]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    theirs: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        theirs.setdefault(key, []).append(value)
    sources = replace(_sources(CONFIG), me=pwd.getpwuid(os.getuid()).pw_name)
    ours = route(Host(name=host), sources)
    assert ours.hostname.lower() == theirs["hostname"][0].lower()
    assert ours.user == theirs["user"][0]
    assert str(ours.port) == theirs["port"][0]
    assert f"{ours.timeout_s:g}" == theirs["connecttimeout"][0]
    listed = _options(host, CONFIG).get("identityfile")
    if listed is not None:
        assert list(listed) == theirs["identityfile"]


def test_identities_add_up_and_the_files_own_come_last() -> None:
    found = _route("node1", CONFIG, Ssh(identity_file=Path("/k")))
    own = HOME / ".ssh"
    assert found.identities == (Path("/k"), own / "first", own / "second")


def test_without_any_the_usual_keys_are_tried() -> None:
    names = [path.name for path in _route("h").identities]
    assert names == ["id_ed25519", "id_ecdsa", "id_rsa"]


def test_what_is_said_of_the_host_wins() -> None:
    sources = _sources(CONFIG, Ssh(user="section", port=1))
    entry = Host(name="node1", user="entry")
    found = route(entry, sources)
    assert (found.user, found.port) == ("entry", 1)


def test_a_given_timeout_wins_and_a_default_does_not() -> None:
    text = "ConnectTimeout 3"
    ssh = Ssh(connect_timeout_s=20.0)
    assert route(Host(name="h"), _sources(text, ssh)).timeout_s == 3
    assert route(Host(name="h"), _sources(text, ssh, given=True)).timeout_s == 20


def test_files_include_others_within_their_block() -> None:
    files = {"more": "User inner\nHost b\nPort 5\n"}
    text = "Host a\nInclude more\nPort 9\n"

    def read(pattern: str) -> list[tuple[str, str]]:
        return [(pattern, files[pattern])]

    directives = parse("config", text, read)
    found = {host: lookup(directives, host, me="me") for host in "ab"}
    assert found["a"] == {"user": ("inner",), "port": ("9",)}
    assert found["b"] == {}


def test_endless_includes_are_refused() -> None:
    with pytest.raises(HostError, match="include each other"):
        parse("config", "Include x", lambda pattern: [("x", "Include x")])


def test_final_looks_again() -> None:
    text = "Match final host *.org\n  User last\nHost a\n  HostName a.org\n"
    assert _options("a", text)["user"] == ("last",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('User "open', "config:1: no closing quotation"),
        ("Port", "config:1: a value is missing"),
        ("Match host", "config:1: Match host needs a value"),
        ("Match exec true\nPort 3", "does not know 'Match exec'"),
        ("Port 0", "Port '0' is not a port"),
        ("Port 22x", "is not a port"),
        ("HostName -oProxyCommand=x", "begins with '-'"),
        ("HostName a b", "is not a host name"),
        ("User -x", "'-x' is not a user name"),
        ("User $(id)", "is not a user name"),
        ("ProxyJump -x", "begins with '-'"),
        ("ProxyJump a;b", "is not a host name"),
        ("ProxyJump h", "more than 8 jump hosts"),
        ("ProxyCommand nc %q", "%q in 'nc %q' cannot be expanded"),
        ("ConnectTimeout soon", "is not a time"),
    ],
)
def test_what_cannot_be_followed_is_refused(text: str, said: str) -> None:
    with pytest.raises(HostError) as caught:
        _route("h", text)
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "", "a;b", "a/b"])
def test_a_name_that_is_none_goes_nowhere(name: str) -> None:
    with pytest.raises(HostError):
        _route(name, "HostName 10.0.0.1")


def _hops(found: Route) -> list[str]:
    hops = []
    hop: Route | None = found
    while hop is not None:
        hops.append(f"{hop.user}@{hop.hostname}:{hop.port}")
        hop = hop.via
    return hops[::-1]


def test_jumps_come_in_order_each_with_its_own_configuration() -> None:
    text = (
        "Host h\n ProxyJump a@g1:7,ssh://g2,[::1]:8\n"
        "Host g1\n ProxyJump g0\nHost g2\n User b\n HostName 10.0.0.2\n"
        "ProxyJump never\nHost h\n User last\n"
    )
    assert _hops(_route("h", text)) == [
        "me@g0:22",
        "a@g1:7",
        "b@10.0.0.2:22",
        "me@::1:8",
        "last@h:22",
    ]


def test_the_users_of_cluster_yaml_are_not_those_of_gates() -> None:
    found = _route("h", "Host h\nProxyJump g", Ssh(user="u", port=5))
    assert _hops(found) == ["me@g:22", "u@h:5"]


def test_the_first_of_jump_and_command_wins() -> None:
    jump, command = "ProxyJump g\n", "ProxyCommand nc %h %p\n"
    first = _route("h", f"Host h\n{jump}{command}")
    assert first.via is not None
    assert first.proxy_command is None
    second = _route("h", f"Host h\n{command}{jump}")
    assert second.via is None
    assert second.proxy_command == "nc h 22"
    assert _route("h", "ProxyCommand none").proxy_command is None
    assert _route("h", "ProxyJump none").via is None


def test_what_goes_into_a_command_stays_one_word() -> None:
    entry = Host(name="h", user="DOM\\a$")
    found = route(entry, _sources("ProxyCommand gate %% %r@%h %n"))
    assert found.proxy_command == "gate % 'DOM\\a$'@h h"


def test_where_keys_of_hosts_are_looked_up() -> None:
    plain = _route("h")
    assert plain.known_hosts[0] == HOME / ".ssh" / "known_hosts"
    assert Path("/etc/ssh/ssh_known_hosts") in plain.known_hosts
    one = _route("h", "UserKnownHostsFile ~/k1 /k2\nGlobalKnownHostsFile none")
    assert one.known_hosts == (HOME / "k1", Path("/k2"))
    given = _route("h", "UserKnownHostsFile ~/k1", Ssh(known_hosts=Path("/k")))
    assert given.known_hosts == (Path("/k"),)


def test_by_which_name_a_key_is_looked_up() -> None:
    assert key_name("Host.A", 22) == "host.a"
    assert key_name("::1", 7) == "[::1]:7"
    assert _route("h", "HostKeyAlias cluster\nPort 7").key_name == "cluster"


def test_switches() -> None:
    found = _route("h", "IdentitiesOnly yes\nIdentityAgent none")
    assert found.identities_only
    assert not found.uses_agent
    assert _route("h").uses_agent

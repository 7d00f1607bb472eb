"""Reads known_hosts as ssh does; ssh-keygen writes the hashed lines."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.schedulers.ssh.server import keygen
from tests.schedulers.ssh.test_errors import ROUTE
from tfcluster.base.errors import HostError
from tfcluster.schedulers.ssh.connect import _check
from tfcluster.schedulers.ssh.known_hosts import HostKey, fingerprint, listed_keys

KEY, OTHER = b"one key", b"another"


def _line(names: str, blob: bytes = KEY, marker: str = "") -> str:
    return f"{marker}{names} ssh-ed25519 {base64.b64encode(blob).decode()} words\n"


def _found(text: str, name: str) -> tuple[HostKey, ...]:
    return listed_keys([("known", text)], name)


@pytest.mark.parametrize(
    ("names", "name", "listed"),
    [
        ("a", "a", True),
        ("a,b", "b", True),
        ("a", "ab", False),
        ("*.org", "x.org", True),
        ("*.org,!x.org", "x.org", False),
        ("n?", "n1", True),
        ("[a]:22", "a", False),
        ("[a]:2222", "[a]:2222", True),
        ("[a]:2222", "[a]:2223", False),
        ("a", "[a]:2222", True),
        ("A.Org", "a.org", True),
    ],
)
def test_who_is_meant(names: str, name: str, *, listed: bool) -> None:
    assert bool(_found(_line(names), name)) is listed


def test_a_listed_port_hides_the_name() -> None:
    text = _line("[a]:7", OTHER) + _line("a", KEY)
    assert [key.blob for key in _found(text, "[a]:7")] == [OTHER]


@pytest.mark.parametrize(
    "line",
    ["", "# a ssh-ed25519 AAAA", "a ssh-ed25519", "a ssh-ed25519 %%%", "@other a b c"],
)
def test_lines_that_say_nothing(line: str) -> None:
    assert _found(line + "\n", "a") == ()


def test_authorities_are_passed_over() -> None:
    assert _found(_line("*", marker="@cert-authority "), "a") == ()


@pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"
)
def test_hashed_names(tmp_path: Path) -> None:
    public = Path(f"{keygen(tmp_path / 'key')}.pub").read_text().split()
    known = tmp_path / "known"
    known.write_text(f"node1,[node2]:7 {public[0]} {public[1]}\n")
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True
    )
    text = known.read_text()
    assert "node1" not in text
    assert len(_found(text, "node1")) == 1
    assert len(_found(text, "[node2]:7")) == 1
    assert _found(text, "node2") == ()
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert fingerprint(base64.b64decode(public[1])) in shown.stdout


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (_line("a"), None),
        (_line("a", OTHER) + _line("a"), None),
        ("", "is unknown"),
        (_line("b"), "is unknown"),
        (_line("a", OTHER), "POSSIBLE ATTACK.*but known:1 has ED25519"),
        (_line("a") + _line("*", marker="@revoked "), "is revoked in known:2"),
        (_line("a") + _line("a", OTHER, "@revoked "), None),
        (_line("a", OTHER, "@revoked "), "is unknown"),
    ],
)
def test_which_keys_are_trusted(text: str, refused: str | None) -> None:
    shown = HostKey("ssh-ed25519", KEY)
    if refused is None:
        _check(ROUTE, shown, _found(text, "a"))
    else:
        with pytest.raises(HostError, match=refused):
            _check(ROUTE, shown, _found(text, "a"))


def test_names_and_patterns_keep_the_order_of_their_lines() -> None:
    blobs = ["AAAA", "BBBB", "CCCC", "DDDD"]
    text = "".join(
        f"{names} ssh-ed25519 {blob}\n"
        for names, blob in zip(
            ["node*", "Node1,10.0.0.1", "other", "*,!node1"], blobs, strict=True
        )
    )
    found = listed_keys([("k", text)], "node1")
    assert [key.where for key in found] == ["k:1", "k:2"]
    assert [key.where for key in listed_keys([("k", text)], "other")] == ["k:3", "k:4"]

"""The explanation and the advice for each kind of failure."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfcluster.base.errors import ExitCode, HostError
from tfcluster.schedulers.ssh import errors
from tfcluster.schedulers.ssh.errors import SshStage
from tfcluster.schedulers.ssh.known_hosts import HostKey
from tfcluster.schedulers.ssh.route import Route

ROUTE = Route(
    name="h2",
    hostname="10.0.0.2",
    port=22,
    user="ann",
    key_name="10.0.0.2",
    known_hosts=(Path("/home/ann/known hosts"),),
    identities=(),
)
KEY = HostKey("ssh-ed25519", b"shown")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (socket.gaierror(-2, "x"), "the name 10.0.0.2 does not resolve"),
        (TimeoutError(), "no answer from h2 (10.0.0.2) port 22 within 10 s"),
        (OSError(errno.ECONNREFUSED, "x"), "port 22 refused the connection"),
        (OSError(errno.EHOSTUNREACH, "x"), "there is no route to h2"),
        (OSError(errno.ENETUNREACH, "x"), "there is no route to h2"),
        (OSError(errno.EACCES, "not allowed"), "cannot connect to h2"),
    ],
)
def test_no_connection(error: OSError, said: str) -> None:
    found = errors.unreachable(ROUTE, error)
    assert said in found.message
    assert found.exit_code is ExitCode.HOST


def test_how_far_it_came() -> None:
    said = {errors.stuck(ROUTE, stage).message for stage in SshStage}
    assert len(said) == len(SshStage)
    assert "stuck after: banner" in errors.stuck(ROUTE, SshStage.BANNER).message


def test_turned_away() -> None:
    found = errors.dropped(ROUTE, SshStage.TCP, "end of file", 3)
    assert "ended the connection after tcp, 3 times: end of file" in found.message
    assert "MaxStartups" in (found.hint or "")


def test_an_unknown_key_is_added_by_its_fingerprint() -> None:
    found = errors.unknown_key(ROUTE, KEY)
    assert "ED25519 SHA256:" in found.message
    add = "ssh-keyscan -t ed25519 10.0.0.2 >> '/home/ann/known hosts'"
    assert add in (found.hint or "")


def test_an_unknown_key_behind_a_gate_cannot_be_scanned() -> None:
    found = errors.unknown_key(replace(ROUTE, via=ROUTE, port=7), KEY)
    assert "ssh -p 7 ann@h2" in (found.hint or "")


def test_a_changed_key_has_no_way_around() -> None:
    known = HostKey("ssh-ed25519", b"listed", "/k:3")
    found = errors.changed_key(ROUTE, KEY, known)
    assert "POSSIBLE ATTACK" in found.message
    assert "/k:3" in found.message
    text = f"{found.message} {found.hint}"
    assert "StrictHostKeyChecking" not in text
    assert "keyscan" not in text
    assert found.hint is not None
    assert found.hint.endswith(f"ssh-keygen -R {ROUTE.key_name} -f /k")


@pytest.mark.parametrize(
    ("tried", "said", "hint"),
    [
        (
            {"accepted": ("publickey",), "refused": ("/k",)},
            "Permission denied (publickey) as user ann; tried /k",
            "authorized_keys",
        ),
        ({}, "no key was available", "ssh-keygen"),
        ({"locked": ("/k",)}, "/k needs a passphrase", "ssh-add /k"),
        (
            {"accepted": ("password",), "refused": ("/k",)},
            "(password) as user ann",
            "only with keys",
        ),
        (
            {"unusable": ("/k cannot be used: x",)},
            "/k cannot be used: x",
            "ssh-keygen",
        ),
    ],
)
def test_denied(tried: dict[str, Any], said: str, hint: str) -> None:
    found = errors.denied(ROUTE, **tried)
    assert said in found.message
    assert hint in (found.hint or "")


@pytest.mark.parametrize(
    ("status", "words", "said"),
    [
        (
            127,
            "bash: line 1: /p: No such file or directory",
            "/p does not exist: bash: ",
        ),
        (1, "/p: Command not found.", "/p does not exist"),
        (127, "", "/p does not exist"),
        (126, "sh: /p: Permission denied", "/p cannot be executed"),
        (2, "Unknown option: -I\nusage: ...", "too old"),
        (1, "Traceback", None),
        (1, "tfcluster: cannot store the agent: No such file or directory", None),
        (0, "", None),
        (None, "", None),
    ],
)
def test_why_no_agent_came(status: int | None, words: str, said: str | None) -> None:
    found = errors.no_agent("/p", status, words)
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert said in found.message
        assert found.exit_code is ExitCode.START


def test_the_end_of_a_program() -> None:
    assert errors.ended(3, ["a", "b"]) == "exit status 3: b"
    assert errors.ended(None, []) == ""
    assert errors.ended(None, ["b"]) == "b"


def test_every_message_names_the_host() -> None:
    told: list[HostError] = [
        errors.proxy_ended(ROUTE, "x"),
        errors.no_jump(ROUTE, ROUTE, "x"),
        errors.no_session(ROUTE, "x"),
        errors.revoked_key(ROUTE, KEY, HostKey("ssh-rsa", b"", "/k:1")),
    ]
    assert all(error.message.startswith("h2: ") for error in told)

"""Inputs that once crashed a parser, or took it too much time or memory."""

from __future__ import annotations

import json
import struct

import pytest

from tests.fuzz.targets import targets
from tests.fuzz.trial import attempt
from tfcluster.protocol.wire import MAX_DEPTH, WireError, loads, parse

_TASK = b'"task":"worker:0","attempt":0'
_LONG = b"9" * 5000
"""More digits than int() accepts."""
_HUGE = b"1" + b"0" * 400
"""Fewer, but a float cannot hold it."""


_PART = b'{"type":"part","index":0,"offset":0,"data":"%b"}'


def _seed(name: str) -> bytes:
    return targets()[name].seeds()[0]


def _message(header: bytes, length: int) -> bytes:
    """Bytes from a ps or a training task that announce arrays of this length."""
    return struct.pack(">IQ", len(header), length) + header


_INPUTS: dict[str, tuple[tuple[str, bytes], ...]] = {
    "requests": (("huge number", b'{"type":"stop","tasks":[],"grace_s":%b}' % _HUGE),),
    "to-launcher": (
        ("tail", b'{"type":"unprepared","tail":6}'),
        ("tail of exit", b'{"type":"exited",%b,"death":0,"tail":1}' % _TASK),
        ("lines", b'{"type":"log",%b,"lines":3}' % _TASK),
        ("pids", b'{"type":"unkillable","pids":true}'),
        ("gpus", b'{"type":"cold","key":"k","cause":"x","tail":2.5}'),
        ("when", b'{"type":"exited",%b,"death":0,"ago_s":%b}' % (_TASK, _HUGE)),
    ),
    "workdir": (
        ("size", _seed("workdir").replace(b'"train.py",13', b'"train.py",%d' % 2**50)),
        ("base64", _seed("workdir") + _PART % b"\xc3\xa9"),
        ("surrogate", _seed("workdir").replace(b"train.py", b"\\ud800")),
    ),
    "address": (
        ("long port", b"h:" + _LONG),
        ("high port", b"h:65536"),
        ("no host", b"[]:10000"),
    ),
    "swap": (
        ("too long", b"\xff" * 8),
        ("announced", (4 << 30).to_bytes(8, "big")),
    ),
    "monitor": (
        ("infinite", b'{"type":"progress","number":1e999}'),
        (
            "too large",
            b'{"type":"query","number":1,"what":"","since_s":%b,"inside":true}' % _HUGE,
        ),
    ),
    "signatures": (("deep", b"[" * 100_000),),
    "ps-bytes": (
        ("a fraction", _message(b'{"arrays":[["uint8",[1.0]]]}', 64) + bytes(64)),
        ("announced", _message(b'{"arrays":[["uint8",[%d]]]}' % 2**62, 2**62)),
        ("negative", _message(b'{"arrays":[["uint8",[-8,-8]]]}', 64) + bytes(64)),
        ("objects", _message(b'{"arrays":[["O",[8]]]}', 64) + bytes(64)),
        ("no bytes", _message(b'{"arrays":[["V0",[8]]]}', 0)),
        ("no items", _message(b'{"arrays":[["uint8",[0,%d]]]}' % 2**70, 0)),
        (
            "dimensions",
            _message(b'{"arrays":[["uint8",%b]]}' % json.dumps([1] * 99).encode(), 64)
            + bytes(64),
        ),
    ),
    "ps-headers": (("no shape", b'{"arrays":[["bool",[[]]]]}'),),
    "ps-service": (("a fraction", b'{"op":"pull","arrays":[["uint8",[1.0]]]}'),),
    "links": (("long name", b'{"run":"%b"}' % (b"fu" * 200)),),
    "record": (
        ("huge number", b'{}\n---\n{}\n---\n{"t":%b,"type":"end"}\n' % _HUGE),
        ("no time", b'{}\n---\n{}\n---\n{"t":1e300,"type":"end"}\n'),
    ),
    "launched": (("no mapping", _seed("launched").replace(b'{"A": "b"}', b"null")),),
    "job-input": (
        ("no mapping", _seed("job-input").replace(b'"secrets": {}', b'"secrets": []')),
    ),
    "sge-variables": (("slots", b"JOB_ID=1\nSGE_TASK_ID=1\nNSLOTS=" + _LONG),),
    "pe-hostfile": (("slots", b"h1 " + _LONG + b" q"),),
    "ssh-config": (
        ("port", b"Host *\nPort " + _LONG),
        ("timeout", b"Host *\nConnectTimeout " + b"9" * 400),
        ("NUL", b"UserKnownHostsFile \0"),
        ("a long word", b"Host " + b"a" * 500_000),
    ),
    "slurm-answers": (
        ("restarts", b"JobState=RUNNING Restarts=" + _LONG),
        ("wait", b"KillWait = " + b"9" * 400 + b" sec"),
        ("time", b"1:" + _LONG),
        ("days", _LONG + b"-1"),
    ),
    "sge-submit": (
        (
            "status",
            b"0\n<detailed_job_info><JB_job_number>12</JB_job_number><JAT_status>"
            + _LONG
            + b"</JAT_status></detailed_job_info>",
        ),
    ),
    "qmaster": (
        ("notice", b"notify " + _LONG),
        ("large notice", b"notify 1" + b"0" * 400),
        ("start", b"<a><JB_job_number/><JAT_start_time>soon</JAT_start_time></a>"),
        ("infinite", b"<a><JB_job_number/><JAT_start_time>inf</JAT_start_time></a>"),
        (
            "limit",
            b"<a><JB_job_number/><qstat_l_requests><CE_name>h_rt</CE_name>"
            b"<CE_doubleval>nan</CE_doubleval></qstat_l_requests></a>",
        ),
    ),
    "config": (("digits", b"command: python t" + b"0" * 30_000),),
    "flags": (
        ("unknown key", b"\n\n" + b"[" * 1300 + b"=a"),
        ("a range", b"[" + b"-" * 1390 + b"4]"),
        ("a long word", b"[::1]\n\nhosts=[a" + b"ne" * 15_000 + b"=hosts=[a"),
    ),
}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, id=f"{name}: {what}")
        for name, inputs in _INPUTS.items()
        for what, data in inputs
    ],
)
def test_what_once_was_a_defect(name: str, data: bytes) -> None:
    outcome = attempt(targets()[name], data)
    assert outcome.defect is None, outcome.defect


@pytest.mark.parametrize(
    "text",
    [b"NaN", b"-Infinity", b"1e999", b"9" * 101, b"[" * 102 + b"]" * 102, b"\xff", b""],
)
def test_what_json_cannot_be_trusted_with_is_refused(text: bytes) -> None:
    with pytest.raises(WireError):
        parse(b'{"type":"x","value":%b}' % text)


def test_limits_of_json_leave_room() -> None:
    assert loads(b"9" * 100) == 10**100 - 1
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(loads(deep)).encode() == deep
    flat = [[number] for number in range(3 * MAX_DEPTH)]
    assert loads(json.dumps(flat).encode()) == flat
    assert loads(b'"\\udce9 [[[["') == "\udce9 [[[["

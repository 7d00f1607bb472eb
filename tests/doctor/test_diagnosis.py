"""The problems that doctor concludes from the facts about each host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tfcluster.doctor.diagnosis import findings, rows, to_json
from tfcluster.doctor.probe_hosts import HostAnswers, peers_to_probe
from tfcluster.launcher.host_facts import certain_lead, clock_warnings
from tfcluster.plan.model import Host

WELL: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"tensorflow": "2.21.0", "keras": "3.15.1", "protobuf": "6.1"},
    "import": {"seconds": 4.2},
    "peers": {"other": "reached"},
    "gpus": [{"name": "H200", "used_mib": 3}],
    "files": {"/data": True, "train.py": True},
    "disks": {"/data": 1 << 40},
    "limits": {"open files": 4096},
}


def report(name: str = "h1", **facts: Any) -> HostAnswers:
    known = HostAnswers(Host(name=name, address=name), address="10.0.0.1", port=1)
    known.facts = {**WELL, **facts}
    known.clock_error_s = 0.01
    return known


def said(*reports: HostAnswers, gpus: int = 0) -> list[str]:
    by_name = {r.host.name: r for r in reports}
    return [str(f) for f in findings(by_name, dict.fromkeys(by_name, gpus), REMEDY)]


REMEDY = "install it there, or set 'python' to another interpreter"


def test_healthy_hosts_have_no_findings() -> None:
    assert said(report("h1"), report("h2"), gpus=1) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"python": "3.9.2"}, "error: Python 3.9.2 is older"),
        ({"packages": {}}, "error: TensorFlow is not installed"),
        ({"packages": {"tensorflow": "2.15.1"}}, "error: TensorFlow 2.15.1 is too old"),
        (
            {"packages": {"tensorflow": "2.16.2", "keras": "3.6.0"}},
            "error: Keras 3.6.0 is too old",
        ),
        (
            {"packages": {"tensorflow": "2.16.2", "keras": "4.0.0"}},
            "warning: Keras 4.0.0 is newer than all that tfcluster was tested with",
        ),
        ({"import": {"error": "ImportError: x"}}, "error: import tensorflow: ImportE"),
        ({"import": {"seconds": 45}}, "warning: import tensorflow takes 45 s"),
        ({"files": {"train.py": False}}, "error: there is no train.py"),
        (
            {"peers": {"h2": "no answer (firewall?)"}},
            "error: cannot reach h2: no answer",
        ),
        ({"disks": {"/tmp": 5 << 20}}, "warning: /tmp has only 5 MiB left"),
        ({"limits": {"open files": 256}}, "warning: only 256 open files"),
        ({"gpus": []}, "error: 0 GPUs found, 1 wanted"),
        ({"gpus": [{"name": "g", "used_mib": 9000}]}, "warning: GPU 0 is in use"),
        ({"disks": {"error": "no such"}}, None),
    ],
)
def test_one_thing_wrong(facts: dict[str, Any], expected: str | None) -> None:
    found = said(report(**facts), gpus=1)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"h1: {expected}")


def test_a_host_that_cannot_be_asked_is_an_error_and_no_more() -> None:
    dead = HostAnswers(Host(name="h9", address="h9"), error="Permission denied")
    assert said(report("h1"), dead) == ["h9: error: Permission denied"]


def test_a_clock_that_is_off() -> None:
    late = report()
    late.clock_error_s = 3600.0
    assert said(late) == ["h1: warning: its clock is +3600 s off"]


def test_the_odd_one_out_is_named() -> None:
    old = {"tensorflow": "2.18.0", "keras": "3.15.1", "protobuf": "6.1"}
    found = said(report("h1"), report("h2"), report("h3", packages=old))
    assert found == ["h3: error: tensorflow 2.18.0, but 2.21.0 on most hosts"]


def test_table_and_json_have_every_host() -> None:
    reports = {
        "h1": report(),
        "h2": HostAnswers(Host(name="h2", address="h2"), error="no"),
    }
    assert [row[0] for row in rows(reports)] == ["h1", "h2"]
    known = to_json(reports, findings(reports, {}, REMEDY))
    assert [h["error"] for h in known["hosts"]] == [None, "no"]
    assert known["findings"] == [{"host": "h2", "text": "no", "error": True}]


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 33, 64, 1000])
def test_every_host_is_tried_by_as_many_as_it_tries(count: int) -> None:
    tried = [peers_to_probe(number, count) for number in range(count)]
    assert all(number not in others for number, others in enumerate(tried))
    by = Counter(other for others in tried for other in others)
    assert set(by.values()) == ({len(tried[0])} if count > 1 else set())
    assert len(tried[0]) == count - 1 if count <= 16 else 4 <= len(tried[0]) <= 10


def test_a_slow_answer_does_not_make_a_clock_wrong() -> None:
    assert certain_lead(104.0, asked_s=100.0, heard_s=105.0) == 0
    assert certain_lead(107.0, asked_s=100.0, heard_s=105.0) == 2
    assert certain_lead(97.0, asked_s=100.0, heard_s=105.0) == -3


def test_clocks_that_are_off_alike_are_reported_together() -> None:
    leads_s = {"h1": 3600.2, "h2": 0.9, "h3": 3599.9, "h4": -5.0}
    assert clock_warnings(leads_s) == [
        "warning: clock of h[1,3]: +3600 s from this machine's",
        "warning: clock of h4: -5 s from this machine's",
    ]

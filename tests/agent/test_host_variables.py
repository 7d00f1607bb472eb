"""What a task's variables say in view of its host's."""

from __future__ import annotations

import json

import pytest

from tfcluster.agent.file_names import raw
from tfcluster.agent.spawn import adapted

CLUSTER = {"worker": ["10.0.0.1:40000", "[fd00::2]:40000"], "ps": ["10.0.0.1:40001"]}
CHANGES = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {}})}
HOSTS = "10.0.0.1,fd00::2,localhost,127.0.0.1,::1"


def env(base: dict[str, str], **changes: str | None) -> dict[str, str | None]:
    given = {raw(name): raw(value) for name, value in base.items()}
    return adapted(given, {**CHANGES, **changes})


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, {}),
        ({"no_proxy": "a"}, {}),
        ({"http_proxy": "http://p"}, {"no_grpc_proxy": HOSTS}),
        ({"http_proxy": "x", "no_proxy": ".a, b"}, {"no_grpc_proxy": f".a,b,{HOSTS}"}),
        (
            {"grpc_proxy": "x", "no_grpc_proxy": "a", "no_proxy": "b"},
            {"no_grpc_proxy": f"a,{HOSTS}"},
        ),
        ({"http_proxy": "x", "no_proxy": "*"}, {"no_grpc_proxy": f"*,{HOSTS}"}),
    ],
)
def test_the_hosts_of_the_run_are_exempt_from_proxies(
    base: dict[str, str], expected: dict[str, str]
) -> None:
    assert env(base) == CHANGES | expected


def test_a_proxy_of_the_configuration_counts_and_an_unset_one_does_not() -> None:
    assert env({}, http_proxy="x")["no_grpc_proxy"] == HOSTS
    assert "no_grpc_proxy" not in env({"http_proxy": "x"}, http_proxy=None)


@pytest.mark.parametrize("config", [None, "", "{}"])
def test_without_a_cluster_only_this_host_is_exempt(config: str | None) -> None:
    changes = env({"http_proxy": "x"}, TF_CONFIG=config)
    assert changes["no_grpc_proxy"] == "localhost,127.0.0.1,::1"


@pytest.mark.parametrize("kind", ["INTRA", "INTER"])
def test_threads_are_limited_unless_the_user_says_otherwise(kind: str) -> None:
    given = {f"TFCLUSTER_{kind}_OP_THREADS": "2"}
    name = f"TF_NUM_{kind}OP_THREADS"
    assert env({}, **given)[name] == "2"
    own = {name: "5"}
    assert name not in env(own, **given)
    assert env({}, **given, **own)[name] == "5"
    assert name not in env({})

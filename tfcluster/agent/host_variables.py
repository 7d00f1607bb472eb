"""Variables of tasks that depend on the variables of their host. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from tfcluster.agent.os_encoding import raw
from tfcluster.protocol.wire import INTRA_OP_THREADS, loads

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_GRPC, _ALL, _UPPER = "no_grpc_proxy", "no_proxy", "NO_PROXY"
_OWN = ("localhost", "127.0.0.1", "::1")
_THREADS = "TF_NUM_INTRAOP_THREADS"

Changes = Mapping[str, str | None]


def adapted(base: Mapping[bytes, bytes], changes: Changes) -> dict[str, str | None]:
    """``changes`` of the environment ``base``, with what follows from both."""
    found = dict(changes)

    def value(name: str) -> str:
        if name in found:
            return found[name] or ""
        return os.fsdecode(base.get(raw(name), b""))

    threads = value(INTRA_OP_THREADS)
    if threads and not value(_THREADS):
        found[_THREADS] = threads
    proxies = (*_PROXIES, *map(str.upper, _PROXIES))
    if not any(map(value, proxies)):
        return found
    # TensorFlow's servers use gRPC, which would ask the proxy for the other tasks.
    hosts = [*_hosts(found.get("TF_CONFIG")), *_OWN]
    listed = value(_ALL) or value(_UPPER)
    everything = listed.strip() == "*"
    if value(_GRPC) or everything:  # gRPC prefers it, and knows no '*'
        found[_GRPC] = _with(value(_GRPC), hosts)
    if not everything:
        found[_ALL] = _with(listed, hosts)
        if value(_UPPER):
            found[_UPPER] = _with(value(_UPPER), hosts)
    return found


def _with(listed: str, hosts: Iterable[str]) -> str:
    known = [word.strip() for word in listed.split(",") if word.strip()]
    return ",".join(dict.fromkeys((*known, *hosts)))


def _hosts(tf_config: str | None) -> list[str]:
    """The hosts of all tasks, from the TF_CONFIG that the launcher has made."""
    try:
        cluster = loads((tf_config or "{}").encode(errors="surrogatepass")).get(
            "cluster", {}
        )
        addresses = [str(each) for listed in cluster.values() for each in listed]
    except (ValueError, AttributeError, TypeError):
        return []
    return [address.rpartition(":")[0].strip("[]") for address in addresses]

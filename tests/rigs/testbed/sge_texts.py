"""Grid Engine's configuration, as text for ``qconf`` and the spool. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

SLOTS_PER_NODE = 4

PARALLEL_ENVIRONMENTS = {"tf": "$round_robin", "tf_fill": "$fill_up", "tf_2": "2"}
"""Parallel environments: name and allocation rule."""

SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
}
"""Settings that make the scheduler quick."""

GLOBAL = {
    "min_uid": "0",  # root's jobs run too
    "min_gid": "0",
    "administrator_mail": "none",
    "load_report_time": "0:0:1",
    "max_unheard": "0:0:10",
    "loglevel": "log_info",
    "gid_range": "64200-64299",
}

_LIMITS = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")


def bootstrap(*, admin: str, spool: Path, common: Path) -> str:
    return _lines(
        {
            "admin_user": admin,
            "default_domain": "none",
            "ignore_fqdn": "false",
            "spooling_method": "classic",
            "spooling_lib": "libspoolc",
            "spooling_params": f"{common};{spool}/qmaster",
            "binary_path": "/usr/sbin",
            "qmaster_spool_dir": f"{spool}/qmaster",
            "security_mode": "none",
            "listener_threads": "2",
            "worker_threads": "2",
            "scheduler_threads": "1",
        }
    )


def changed(text: str, changes: Mapping[str, str]) -> str:
    """The configuration with changed values. Raises KeyError for an unknown name."""
    rows = (line.split(None, 1) for line in text.splitlines())
    values = {row[0]: row[1] for row in rows if len(row) == 2 and row[0][0] != "#"}
    if unknown := set(changes) - set(values):
        raise KeyError(f"Grid Engine does not know {sorted(unknown)}")
    return _lines({**values, **changes})


def exec_host(name: str) -> str:
    rest = ("load_scaling", "complex_values", "user_lists", "xuser_lists", "projects")
    more = ("xprojects", "usage_scaling", "report_variables")
    return _lines({"hostname": name, **dict.fromkeys((*rest, *more), "NONE")})


def host_group(names: Iterable[str]) -> str:
    return _lines({"group_name": "@allhosts", "hostlist": " ".join(names)})


def parallel_environment(name: str, rule: str) -> str:
    none = ("user_lists", "xuser_lists", "start_proc_args", "stop_proc_args")
    return _lines(
        {
            "pe_name": name,
            "slots": "999",
            **dict.fromkeys(none, "NONE"),
            "allocation_rule": rule,
            "control_slaves": "TRUE",
            "job_is_first_task": "FALSE",
            "urgency_slots": "min",
            "accounting_summary": "FALSE",
            "qsort_args": "NONE",
        }
    )


def queue() -> str:
    """The configuration of ``all.q``, on every node, without limits."""
    none = "load_thresholds suspend_thresholds ckpt_list prolog epilog starter_method"
    more = "suspend_method resume_method terminate_method owner_list user_lists"
    rest = "xuser_lists subordinate_list complex_values projects xprojects calendar"
    limits = {f"{kind}_{limit}": "INFINITY" for limit in _LIMITS for kind in "sh"}
    return _lines(
        {
            "qname": "all.q",
            "hostlist": "@allhosts",
            "seq_no": "0",
            "nsuspend": "1",
            "suspend_interval": "00:05:00",
            "priority": "0",
            "min_cpu_interval": "00:05:00",
            "processors": "UNDEFINED",
            "qtype": "BATCH INTERACTIVE",
            "pe_list": " ".join(PARALLEL_ENVIRONMENTS),
            "rerun": "FALSE",
            "slots": str(SLOTS_PER_NODE),
            "tmpdir": "/tmp",
            "shell": "/bin/sh",
            "shell_start_mode": "unix_behavior",
            "notify": "00:00:12",
            "initial_state": "default",
            **dict.fromkeys(f"{none} {more} {rest}".split(), "NONE"),
            **limits,
        }
    )


def _lines(values: Mapping[str, str]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())

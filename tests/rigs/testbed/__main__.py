"""``python -m tests.rigs.testbed``: commands to use a rig by hand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from tests.rigs.testbed import packages, record
from tests.rigs.testbed.commands import RigError, Unavailable
from tests.rigs.testbed.host import Host, Login
from tests.rigs.testbed.rig import Options, Testbed


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    try:
        return int(given.do(given) or 0)
    except (RigError, ValueError) as error:
        print(f"testbed: {error}", file=sys.stderr)  # noqa: T201 - a command-line tool
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rigs.testbed", description=__doc__
    )
    parser.add_argument("--name", default="rig", help="of the rig (default: rig)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="put it up")
    up.add_argument("-n", "--nodes", type=int, default=4)
    up.add_argument("--slurm", action="store_true")
    up.add_argument("--sge", action="store_true")
    up.set_defaults(do=_up)
    install = commands.add_parser("install", help="Debian packages that rigs need")
    install.set_defaults(do=_install)
    commands.add_parser("down", help="take it down").set_defaults(do=_down)
    commands.add_parser("status", help="every rig and host").set_defaults(do=_status)
    run = commands.add_parser("exec", help="run a program on a host")
    run.add_argument("-u", "--user", default="root", help="root, alice or bob")
    run.add_argument("host")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    run.set_defaults(do=_exec)
    for name, (do, about) in _TO_A_HOST.items():
        one = commands.add_parser(name, help=about)
        one.add_argument("host")
        one.set_defaults(do=_to_a_host, to_host=do)
    return parser


_TO_A_HOST: dict[str, tuple[Callable[[Host], None], str]] = {
    "cut": (lambda host: host.cable.cut(), "cut the cable of a host, in silence"),
    "heal": (lambda host: host.cable.heal(), "mend it"),
    "kill": (lambda host: host.power_off(), "cut the cable, then end every process"),
}


def _up(given: argparse.Namespace) -> None:
    options = Options(nodes=given.nodes, slurm=given.slurm, sge=given.sge)
    rig = Testbed.up(options, name=given.name)
    rig.keep()
    _say(" ".join(host.name for host in rig.hosts))


def _install(_: argparse.Namespace) -> None:
    """Install the packages; tests that need a missing package will be skipped."""
    for group in packages.NEEDS:
        try:
            packages.install((group,), record.PACKAGES_LOCK)
        except Unavailable as error:
            _say(f"testbed: tests that need {group} will be skipped: {error}")


def _down(given: argparse.Namespace) -> None:
    record.sweep()
    Testbed.attach(given.name).down()


def _status(_: argparse.Namespace) -> None:
    record.sweep()
    for name in record.names():
        try:
            rig = Testbed.attach(name)
        except RigError:
            _say(f"{name} is not up yet, or no more")
            continue
        for host in rig.hosts:
            state = f"{len(host.processes())} processes" if host.alive else "off"
            _say(f"{name} {host.name} {host.address} {state}")


def _exec(given: argparse.Namespace) -> None:
    host = Testbed.attach(given.name).host(given.host)
    argv = host.argv(given.argv or ("bash",), Login(user=given.user))
    os.execvp(argv[0], argv)


def _to_a_host(given: argparse.Namespace) -> None:
    given.to_host(Testbed.attach(given.name).host(given.host))


def _say(line: str) -> None:
    print(line)  # noqa: T201 - a command-line tool


if __name__ == "__main__":
    sys.exit(main())

"""The ``tfcluster`` command: words and options in, an exit code out.

Only this module knows click. It imports what a command needs when it runs, so that
``--help`` and ``status`` answer at once. stdout is data, stderr is talk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from tfcluster import __version__
from tfcluster.errors import ExitCode, ResourceError, TfclusterError
from tfcluster.model import BACKENDS

_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the file; KEY is dotted (tasks.worker=4).",
)
_RUN = click.argument("run", required=False, metavar="[RUN]")


class _Commands(click.Group):
    """Lists commands in the order of use, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="tfcluster")
def cli() -> None:
    """Train an unmodified TensorFlow or Keras script on all your machines.

    \b
    tfcluster launch cluster.yaml              train as the file says
    tfcluster launch -n 4 -- python train.py   4 workers on this machine
    tfcluster status                           how far it is
    """


@cli.command()
@click.argument("words", nargs=-1, metavar="CONFIG.yaml [-- ARG...]")
@_SET
@click.option("--name", help="Name of the run; one active run holds it.")
@click.option("-d", "--detach", is_flag=True, help="Go on in the background.")
@click.option("--dry-run", is_flag=True, help="Show the plan and start nothing.")
@click.option("-n", "count", type=int, metavar="N", help="No file: N workers.")
@click.option("--ps", type=int, default=0, metavar="M", help="No file: M ps tasks.")
@click.option("--hosts", metavar="HOST[:SLOTS],...", help="No file: SSH hosts.")
@click.option("--submitted", metavar="FOLDER", hidden=True, help="For submit scripts.")
def launch(words: tuple[str, ...], **options: Any) -> int:
    """Start all tasks and stay until they have ended.

    With CONFIG, what follows it is appended to its command. With -n N instead, all
    words are the command: `tfcluster launch -n 4 -- python train.py`.
    """
    from tfcluster import launching

    return launching.launch(words, launching.Options(**options), os.environ)


@cli.command()
@click.argument("config", metavar="CONFIG.yaml")
@_SET
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(config: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show every task as it would be started.

    Its host, command, environment, TF_CONFIG, log, and where values came from.
    """
    from tfcluster import launching

    return launching.plan(config, overrides, os.environ, as_json=as_json)


@cli.command()
@click.argument("config", metavar="CONFIG.yaml")
@_SET
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
def submit(config: str, overrides: tuple[str, ...], dry_run: bool) -> int:
    """Queue a job that launches CONFIG, and print its id.

    `launch` does that too where nothing is allocated, and stays until the end.
    """
    from tfcluster import launching

    return launching.submit(config, overrides, os.environ, dry_run=dry_run)


@cli.command()
@_RUN
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--watch", is_flag=True, help="Show it again as it changes.")
def status(run: str | None, as_json: bool, watch: bool) -> int:
    """Show how a run stands.

    RUN is an id, the beginning of one, or a name. Without it: the newest run, and a
    line for each other one.
    """
    from tfcluster import looking

    return looking.status(run, os.environ, as_json=as_json, watch=watch)


@cli.command()
@click.argument("words", nargs=-1, metavar="[RUN] [TASK]...")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@click.option("-n", "count", default=10, metavar="N", help="Last lines of each task.")
def logs(words: tuple[str, ...], follow: bool, count: int) -> int:
    """Show what tasks have printed.

    TASK is worker:0, or worker for all of them; without it all tasks.
    """
    from tfcluster import looking

    return looking.logs(words, os.environ, follow=follow, count=count)


@cli.command()
@_RUN
@click.option("--now", is_flag=True, help="Kill at once, without the grace period.")
def stop(run: str | None, now: bool) -> int:
    """End a run and all that belongs to it.

    Without RUN the newest.
    """
    from tfcluster import looking

    return looking.stop(run, os.environ, now=now)


@cli.command()
@click.argument("config", metavar="CONFIG.yaml")
@_SET
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--quick", is_flag=True, help="Do not import TensorFlow on the hosts.")
def doctor(config: str, overrides: tuple[str, ...], as_json: bool, quick: bool) -> int:
    """Look at all hosts for what would go wrong.

    Exits with 4 where a launch would fail.
    """
    from tfcluster import examining

    return examining.doctor(config, overrides, os.environ, as_json=as_json, quick=quick)


@cli.command()
def schema() -> int:
    """Print the JSON Schema of cluster.yaml."""
    import json

    from tfcluster import config

    click.echo(json.dumps(config.schema(), indent=2))
    return 0


@cli.command()
@click.option(
    "--backend", default="local", show_default=True, type=click.Choice(BACKENDS)
)
def init(backend: str) -> int:
    """Print a commented cluster.yaml to start from."""
    from tfcluster import config

    click.echo(config.starter(backend), nl=False)
    return 0


def main() -> NoReturn:
    """The entry point: the one place where errors become exit codes."""
    sys.exit(_guarded(lambda: cli(standalone_mode=False)))


def _guarded(command: Callable[[], int | None]) -> int:
    try:
        return int(command() or 0)
    except TfclusterError as error:
        return _refused(error.lines(), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.UsageError as error:
        said = [f"error: {error.format_message()}", *_hints(error)]
        return _refused(said, ExitCode.USAGE)
    except click.ClickException as error:
        return _refused([f"error: {error.format_message()}"], ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        return _refused(_crashed(error).lines(), ExitCode.RESOURCES)


def _hints(error: click.UsageError) -> list[str]:
    if error.ctx is None:
        return []
    if error.ctx.info_name == "launch" and isinstance(error, click.NoSuchOption):
        return [
            f"  hint: if {error.option_name} belongs to your own command, write `--` "
            "before that: `tfcluster launch -n 4 -- python train.py --epochs 3`"
        ]
    return [f"  hint: {error.ctx.command_path} --help"]


def _refused(lines: list[str], code: ExitCode) -> ExitCode:
    from tfcluster.console.sanitise import sanitise

    for line in filter(None, lines):
        click.echo(sanitise(line), err=True)
    return code


def _crashed(error: Exception) -> TfclusterError:
    """A fault of our own: the traceback goes to a file, the user gets one line."""
    from tfcluster.crash import save_crash

    where = save_crash(error, os.environ)
    kept = f"; please report it with {where}" if where else ""
    return ResourceError(
        f"tfcluster itself failed: {type(error).__name__}: {error}{kept}"
    )

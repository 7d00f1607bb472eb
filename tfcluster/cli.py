"""The ``tfcluster`` command: arguments and options in, an exit code out.

Only this module knows click. A command's modules are imported when it runs, so that
``--help`` and ``status`` answer at once. Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

_EARLY = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _EARLY:
    # Ctrl-C during the imports must end the command without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import click  # noqa: E402 - only once Ctrl-C is harmless

from tfcluster import __version__, schedulers  # noqa: E402
from tfcluster.base.errors import ExitCode, TfclusterError  # noqa: E402
from tfcluster.console.output import OutputClosedError, escape_unknown, put  # noqa: E402

if _EARLY:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _completes(kind: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """How a shell completes an argument or option; TAB imports the module for it."""

    def words(context: click.Context, _: click.Parameter, word: str) -> list[Any]:
        from tfcluster import cli_completion

        behind = context.meta.get(_BEHIND)
        return list(cli_completion.complete(kind, context, word, behind))

    return words


_Decorator = Callable[[Any], Any]


def _all_of(*options: _Decorator) -> _Decorator:
    def command(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return command


_flag = functools.partial(click.option, is_flag=True)
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=_completes("setting"),
    help="Replace a value of the file; KEY is dotted (tasks.worker=4).",
)
_PASS = click.option(
    "-x",
    "--env",
    "passed",
    multiple=True,
    metavar="NAME[=VALUE]",
    shell_complete=_completes("variable"),
    help="Pass a variable on to all tasks; without VALUE, with its value here.",
)
_configured = _all_of(_SET, _PASS)
_CONFIG = click.argument("path", metavar="CONFIG.yaml")
_NAME = click.option("--name", help="Name of the run; only one active run can have it.")
_TASKS = click.argument(
    "words", nargs=-1, metavar="[RUN] [TASK]...", shell_complete=_completes("task")
)
_RUN = click.argument(
    "run", required=False, metavar="[RUN]", shell_complete=_completes("run")
)
_DETACH = _flag(
    "-d", "--detach", help="Return immediately; the run continues in the background."
)
_JSON = _flag("--json", "as_json", help="Print JSON.")
_MESSAGES = _all_of(
    _flag("-q", "--quiet", help="Show only warnings, errors and the result."),
    _flag("-v", "--verbose", "everything", help="Also show what is usually left out."),
    _flag("--timestamps", help="Show the time before each line."),
    click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="Use colours; auto: on a terminal, unless NO_COLOR is set.",
    ),
)
_instead_of_a_file = _all_of(
    click.option(
        "-n", "count", type=int, metavar="N", help="Without a file: N workers."
    ),
    click.option(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="Without a file: M parameter servers.",
    ),
    click.option(
        "--gpus", type=int, metavar="G", help="Without a file: G GPUs for each worker."
    ),
    click.option(
        "--hosts", metavar="[USER@]HOST[:SLOTS],...", help="Without a file: SSH hosts."
    ),
)
_OTHER_COMMANDS = {
    **dict.fromkeys(("run", "start", "train", "exec"), "launch"),
    **dict.fromkeys(("kill", "cancel", "down"), "stop"),
    **dict.fromkeys(("ps", "ls", "runs"), "list"),
    **dict.fromkeys(("log", "tail"), "logs"),
    **dict.fromkeys(("show", "check", "validate"), "plan"),
}
"""Commands of other software -> ours."""
_COMMANDS = "tfcluster.commands"
_BEHIND = "tfcluster.behind"
_ASKED = "_TFCLUSTER_COMPLETE"  # set by the script of `tfcluster completion`


def _display_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options for what is displayed, as the argument ``display``."""

    @functools.wraps(command)
    def displayed(
        quiet: bool, everything: bool, timestamps: bool, color: str, **others: Any
    ) -> int:
        from tfcluster.console.display import Display

        display = Display(
            quiet=quiet,
            everything=everything,
            timestamps=timestamps,
            colours={"always": True, "never": False}.get(color),
        )
        return command(display=display, **others)

    decorated: Callable[..., int] = _MESSAGES(displayed)
    return decorated


def _calls(place: str) -> Callable[[Callable[[], None]], Callable[..., int]]:
    """A command that is ``place``, a function in ``commands``, as ``module.name``."""

    def command(described: Callable[[], None]) -> Callable[..., int]:
        @functools.wraps(described)
        def called(**options: Any) -> int:
            module, _, name = place.partition(".")
            function = getattr(importlib.import_module(f"{_COMMANDS}.{module}"), name)
            return int(function(environ=os.environ, **options))

        return called

    return command


def _output(default: str) -> _Decorator:
    about = f"Default: {default}; - for standard output."
    return click.option("-o", "--output", metavar="FILE", type=click.Path(), help=about)


class _Launch(click.Command):
    """Remembers how many words follow ``--``, which click itself discards."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            ctx.meta[_BEHIND] = len(args) - args.index("--") - 1
        return super().parse_args(ctx, args)


def _behind() -> int:
    return int(click.get_current_context().meta.get(_BEHIND, 0))


class _Commands(click.Group):
    """Lists commands in the order of use, not alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and (ours := self._near(args[0])):
            message = f"No such command {args[0]!r}; did you mean {ours!r}?"
            meant = self.commands[ours]
            raise click.UsageError(
                message,
                meant.make_context(ours, [], parent=ctx, resilient_parsing=True),
            )
        return super().resolve_command(ctx, args)

    def _near(self, word: str) -> str | None:
        import difflib  # imported here: few command lines need it

        near = difflib.get_close_matches(word, self.commands, n=1)
        return _OTHER_COMMANDS.get(word) or next(iter(near), None)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="tfcluster")
def cli() -> None:
    """Train an unmodified TensorFlow or Keras script on all your machines.

    \b
    tfcluster launch cluster.yaml              train as configured
    tfcluster launch -n 4 -- python train.py   4 workers on this machine
    tfcluster status                           show progress

    Exit codes: 0 success, 1 a task failed, 2 configuration or usage, 3 a host is not
    reachable or not trusted, 4 start-up failed, 5 contact lost, 6 no progress, 7 the
    run is already active, 8 the launcher's own resources, 75 preempted, 124 time
    limit, 129 hung up, 130 interrupted, 143 terminated.
    """


def _command_with_words(metavar: str) -> Callable[[Callable[..., int]], click.Command]:
    """A command that gets a file, a program or both as ``words``."""

    def command(function: Callable[..., int]) -> click.Command:
        completes = _completes("command")
        words = click.argument(
            "words", nargs=-1, metavar=metavar, shell_complete=completes
        )
        return cli.command(cls=_Launch)(words(function))

    return command


@_command_with_words("CONFIG.yaml [-- ARG...]")
@_configured
@_NAME
@_DETACH
@_flag("--dry-run", help="Show the plan and start nothing.")
@_flag("--trace", help="Record steps and exchanges for `tfcluster trace`.")
@_instead_of_a_file
@_display_options
@click.option("--submitted", metavar="FOLDER", hidden=True, help="For submit scripts.")
def launch(words: tuple[str, ...], **options: Any) -> int:
    """Start all tasks and wait until they have ended.

    With CONFIG, the words after `--` are appended to its command. With -n N instead,
    all words are the command.

    \b
    tfcluster launch cluster.yaml
    tfcluster launch cluster.yaml --set tasks.worker=4 -- --epochs 3
    tfcluster launch -n 4 -- python train.py
    tfcluster launch -n 4 --gpus 1 -- python train.py
    tfcluster launch -n 4 --hosts node1:2,node2:2 -- python train.py
    """
    from tfcluster.commands import launch

    return launch.launch(
        words, launch.LaunchOptions(**options, behind=_behind()), os.environ
    )


@_command_with_words("CONFIG.yaml [-- ARG...]")
@_configured
@_instead_of_a_file
@_JSON
@_display_options
def plan(words: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Show every task as it would be started.

    Shows its host, command, environment, TF_CONFIG and log, and the source of each
    value. With -v, also shows tfcluster's own variables; with -q, shows only problems.
    Inside a job of a scheduler, the hosts are those of the job.

    \b
    tfcluster plan cluster.yaml
    tfcluster plan cluster.yaml --set tasks.worker=8
    tfcluster plan -n 4 -- python train.py     without a file
    """
    from tfcluster.commands import launch

    chosen = launch.LaunchOptions(**options, behind=_behind(), verb="plan")
    return launch.plan(words, chosen, os.environ, as_json=as_json)


@cli.command()
@_CONFIG
@_configured
@_NAME
@_flag("--dry-run", help="Print the script and submit nothing.")
@_calls("launch.submit")
def submit() -> None:
    """Queue a job that launches CONFIG, and print its id.

    Outside an allocation `launch` also submits a job, and follows it to the end.

    \b
    tfcluster submit cluster.yaml --dry-run                the script
    tfcluster submit cluster.yaml --set slurm.nodes=4
    """


@cli.command()
@_RUN
@_JSON
@_flag("--watch", help="Refresh as the run changes.")
@_calls("status_logs.status")
def status() -> None:
    """Show the state of a run.

    RUN is a run id, a unique prefix of one, or a name. Default: the newest run, and
    one line for each active run and for the last five.

    \b
    tfcluster status
    tfcluster status digits --watch
    tfcluster status --json | jq .runs[0].state
    """


@cli.command()
@_TASKS
@_flag("-f", "--follow", help="Follow until the run is over.")
@click.option(
    "-n",
    "count",
    default=10,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of last lines per task, from the last 8 MiB of its log.",
)
@_flag(
    "-v",
    "--verbose",
    "everything",
    help="Show all lines: also those that launch leaves out, and each rank's.",
)
@_calls("status_logs.logs")
def logs() -> None:
    """Show what tasks have printed.

    TASK is a task (worker:0) or a type (worker). Default: all tasks. A line that
    several ranks have printed is shown once.

    \b
    tfcluster logs                     the newest run
    tfcluster logs worker:1 -n 100
    tfcluster logs digits worker -f
    """


@cli.command()
@_RUN
@_flag("--now", help="Kill all tasks at once, and the launcher if it does not respond.")
@_calls("status_logs.stop")
def stop() -> None:
    """Stop a run and all its processes.

    Default: the newest run.

    \b
    tfcluster stop
    tfcluster stop digits --now
    """


@cli.command()
@_RUN
@click.option("--name", help="Name of the new run; default: RUN's name.")
@_DETACH
@_display_options
@_calls("launch.rerun")
def rerun() -> None:
    """Launch again what RUN was launched with, as a new run.

    The configuration is that of RUN, even if its file has changed since. Secrets are
    read again. Default: the newest run.

    \b
    tfcluster rerun
    tfcluster rerun digits-20261120-101500-3f2a --name second -d
    """


@cli.command()
@_RUN
@_display_options
@_calls("attach.attach")
def attach() -> None:
    """Follow a run in the background: its output, progress and end.

    Exits with the run's exit code. Ctrl-C ends only this command; the run continues.
    Default: the newest run.

    \b
    tfcluster launch -d cluster.yaml
    tfcluster attach
    """


@cli.command()
@_TASKS
@_JSON
@_calls("launcher_requests.stacks")
def stacks() -> None:
    """Show where running tasks are in their Python code.

    TASK is a task (worker:0) or a type (worker). Default: all tasks of the newest run.
    Only tasks that run under the training runtime can answer.

    \b
    tfcluster stacks
    tfcluster stacks digits worker:1
    """


@cli.command()
@click.argument(
    "words", nargs=-1, metavar="[RUN] CHANGE...", shell_complete=_completes("run")
)
@_flag("--now", help="Do not wait for the end of the epoch.")
@_calls("launcher_requests.resize")
def resize() -> None:
    """Change the number of workers of a run, or add hosts.

    CHANGE is worker=N or hosts+=NAME[:SLOTS]. New hosts are made ready while the tasks
    train. When the epoch ends, all tasks restart, and continue from the checkpoint that
    your script has saved. A script that does not use fit restarts as soon as the hosts
    are ready.

    \b
    tfcluster resize digits worker=8
    tfcluster resize digits hosts+=node9
    tfcluster resize digits worker=12 hosts+=node[9-10]:4 --now
    """


@cli.command()
@click.argument(
    "words", nargs=-1, metavar="[RUN] [PATTERN]...", shell_complete=_completes("run")
)
@_flag("--all", "every", help="From every host, into results-by-host/HOST.")
@_flag("--force", help="Replace files here that are newer.")
@_JSON
@_calls("fetch.fetch")
def fetch() -> None:
    """Fetch files that tasks wrote on hosts that do not share the folder.

    PATTERN is a name or path with * and ?, or a folder (logs/). Default: the results of
    the configuration, from the chief's host. The run may be active or over. Files that
    are already here are not sent again, and a file here that is newer is kept.

    \b
    tfcluster fetch
    tfcluster fetch digits '*.keras' logs/
    tfcluster fetch digits --all
    """


@cli.command()
@_RUN
@_output("RUN-trace.json")
@_calls("report_trace.trace")
def trace() -> None:
    """Write where the time of a run went, for Perfetto or chrome://tracing.

    Shows the start of the hosts, attempts, stalls and failures of any run; steps,
    exchanges and saves of runs launched with --trace. Default: the newest run.

    \b
    tfcluster launch --trace cluster.yaml
    tfcluster trace
    tfcluster trace digits -o digits.json
    """


@cli.command()
@_RUN
@_output("RUN-report.html")
@_calls("report_trace.report")
def report() -> None:
    """Write one HTML file about a run, and print its path.

    It shows what was run, the timeline of tasks, losses and metrics, speed and waiting
    of each rank, memory, exchanges, and failures. The file loads nothing, so it can be
    sent to others. Needs matplotlib: pip install 'tfcluster[report]'. Default: the
    newest run.

    \b
    tfcluster report
    tfcluster report digits -o digits.html
    """


@cli.command()
@_RUN
@click.option("--logdir", metavar="FOLDER", help="Default: where RUN has written.")
@click.option("--port", type=int, metavar="N", help="TensorBoard's port.")
@_calls("tensorboard.tensorboard")
def tensorboard() -> None:
    """Print the folder of a run's TensorBoard logs, and start TensorBoard there.

    TensorBoard must be installed for the run's Python, or be on the PATH.

    \b
    tfcluster tensorboard
    tfcluster tensorboard digits --port 6007
    """


@cli.command("list")
@click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the N newest runs.",
)
@_JSON
@_calls("status_logs.list_runs")
def list_runs() -> None:
    """List runs, the newest first.

    \b
    tfcluster list
    tfcluster list --limit 100
    tfcluster list --json | jq -r '.runs[] | select(.state == "failed") | .run'
    """


@cli.command()
@click.option(
    "--older-than",
    default="7d",
    show_default=True,
    metavar="AGE",
    help="Remove what ended longer ago than this: 12h, 7d, 0s.",
)
@_flag(
    "--environments",
    help="Also remove this machine's environments of requirements files that were "
    "not used for this long.",
)
@_flag("--dry-run", help="Show what would be removed.")
@_calls("clean.clean")
def clean() -> None:
    """Remove the records and logs of old runs, and old crash files.

    Prints what is removed. A run that is not over is never removed, nor one whose job
    a scheduler may start again.

    \b
    tfcluster clean
    tfcluster clean --older-than 30d --dry-run
    tfcluster clean --environments
    """


@cli.command()
@_CONFIG
@_configured
@_JSON
@_flag("--quick", help="Do not import TensorFlow on the hosts.")
@_display_options
@_calls("doctor.doctor")
def doctor() -> None:
    """Check all hosts for problems before a launch.

    With -v, also shows what else was found out about each host. Exits with 3 if a host
    cannot be reached, and with 4 if a launch would fail for another reason.

    \b
    tfcluster doctor cluster.yaml
    tfcluster doctor cluster.yaml --quick
    """


@cli.command()
@_CONFIG
@_configured
@_calls("doctor.setup")
def setup() -> None:
    """Run the setup lines and make the environment on all hosts, and start nothing.

    A launch does that, too. Prints the interpreter that tasks have on each host. Exits
    with 3 if a host cannot be reached, and with 4 if it cannot be set up.

    \b
    tfcluster setup cluster.yaml
    """


@_command_with_words("[CONFIG.yaml] [-- COMMAND...]")
@_configured
@click.option("-n", "count", type=int, metavar="N", help="Number of workers.")
@click.option("--ps", type=int, default=0, metavar="M", help="M parameter servers.")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    metavar="K",
    help="Compare K steps; 0: until the program ends.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Largest difference that counts as equal, relative to each array."
    "  [default: what the program alone differs from itself]",
)
@_flag("--in-place", help="Run in the folder itself, not in copies of it.")
@_JSON
@_display_options
def verify(words: tuple[str, ...], **options: Any) -> int:
    """Check that ranks compute what one process computes.

    Runs the program alone and then on the ranks, both on this machine with the same
    seeds and in copies of the working directory, and compares weights, optimizers'
    variables, losses and metrics after each step. If the program ends within the
    steps, also compares the files that it wrote and what it printed. Exits with 1 if
    they differ. With -v, also shows what the program printed each time.

    \b
    tfcluster verify -n 2 -- python train.py
    tfcluster verify -n 3 --steps 0 -- python train.py --epochs 1
    tfcluster verify cluster.yaml
    """
    from tfcluster.commands import verify

    return verify.verify(words, verify.VerifyOptions(**options), os.environ)


@_command_with_words("[CONFIG.yaml] [-- COMMAND...]")
@_configured
@click.option(
    "-n",
    "count",
    type=int,
    metavar="N",
    help="Number of workers.  [default: those of CONFIG, or 2]",
)
@_JSON
@_display_options
@_calls("explain.explain")
def explain() -> None:
    """Show how a program would be divided among ranks, without starting them.

    Runs the program in one process until it has trained one step. For each tf.function
    that ran, shows which share of the work ranks divide, what they exchange in each
    call, and what each of them has to compute whole, with the lines of the script that
    are the reason. What the program prints goes to stderr.

    \b
    tfcluster explain -n 4 -- python train.py
    tfcluster explain cluster.yaml
    tfcluster explain --json cluster.yaml | jq .functions[0].divided_share
    """


@cli.command()
@click.argument(
    "name", default="cluster", metavar="[NAME]", shell_complete=_completes("format")
)
def schema(name: str) -> int:
    """Print the JSON Schema of cluster.yaml, or of what a command prints as JSON.

    Editors check and complete cluster.yaml with it. Other NAMEs: status, status-all,
    list, outcome (for on_end), plan, verify, explain, doctor, stacks, fetch.

    \b
    tfcluster schema > cluster.schema.json
    tfcluster schema status
    """
    from tfcluster.commands import schema

    put(schema.schema(name))
    return 0


@cli.command()
@click.option(
    "--backend",
    default="local",
    show_default=True,
    type=click.Choice(schedulers.names()),
)
def init(backend: str) -> int:
    """Print a commented cluster.yaml to start from.

    \b
    tfcluster init > cluster.yaml
    tfcluster init --backend slurm > cluster.yaml
    """
    from tfcluster import config

    put(config.starter(backend))
    return 0


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script of a shell.

    TAB then completes commands, options, files, keys of --set, runs and tasks. Where
    tfcluster knows nothing, the shell completes the names of files.

    \b
    eval "$(tfcluster completion bash)"                      in ~/.bashrc
    source <(tfcluster completion zsh)                       in ~/.zshrc, after compinit
    tfcluster completion fish > ~/.config/fish/completions/tfcluster.fish
    """
    from tfcluster.commands import completion

    put(completion.SCRIPTS[shell])
    return 0


def main() -> NoReturn:
    """The entry point: the one place where errors become exit codes."""
    escape_unknown()
    if _ASKED in os.environ:
        from tfcluster import cli_completion

        put(cli_completion.answer(cli, os.environ))
        sys.exit(0)
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
        lines = [f"error: {error.format_message()}", *_hints(error)]
        return _refused(lines, ExitCode.USAGE)
    except click.ClickException as error:
        return _refused([f"error: {error.format_message()}"], ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except (OutputClosedError, BrokenPipeError):
        return ExitCode.OK
    except FileNotFoundError as error:
        if _has_folder():
            return _crashed(error)
        gone = "error: the current directory no longer exists"
        return _refused([gone, "  hint: cd to one that does"], ExitCode.USAGE)
    except Exception as error:
        return _crashed(error)


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109 - Path.cwd() makes a Path of it
    except FileNotFoundError:
        return False


def _hints(error: click.UsageError) -> list[str]:
    if error.ctx is None:
        return []
    if error.ctx.info_name in ("launch", "plan") and isinstance(
        error, click.NoSuchOption
    ):
        return [
            f"  hint: if {error.option_name} belongs to your own command, write `--` "
            "before the command: `tfcluster launch -n 4 -- python train.py --epochs 3`"
        ]
    return [f"  hint: {error.ctx.command_path} --help"]


def _refused(lines: list[str], code: ExitCode) -> ExitCode:
    from tfcluster.console.sanitise import sanitise

    for line in filter(None, lines):
        click.echo(sanitise(line), err=True)
    return code


def _crashed(error: Exception) -> ExitCode:
    from tfcluster.record.crash import crashed

    return _refused(crashed(error, os.environ).lines(), ExitCode.RESOURCES)

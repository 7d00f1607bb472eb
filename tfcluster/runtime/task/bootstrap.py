"""Entry point of a task: prepares the interpreter, then runs the program or a server.

``docs/protocols.md`` ("Bootstrap") lists the arguments. TensorFlow is not imported
here, because a program that does not need it should not have to wait for it.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from tfcluster.base.process_title import set_title
from tfcluster.runtime.context import Context, context_from
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.files.order import FOLDER
from tfcluster.runtime.horovod import module_names
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.scripts.run_script import Script, parse, run
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.task import injection
from tfcluster.runtime.task.generators import seed_generators
from tfcluster.runtime.task.import_hook import around_import
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.exit_status import cause

BELOW_WRAPPER = "below-wrapper"
"""The first argument if a wrapper, which may change the environment, was used."""

USAGE = "usage: bootstrap run SCRIPT|-m MODULE|-c CODE [ARG...] | server"

LIBRARIES = ("tensorflow", "keras")

SAME_PROGRAM = "TFCLUSTER_SAME_PROGRAM"
"""The variable of an evaluator that runs the same program as the ranks."""

MARK = "TFCLUSTER_RUN"
"""The variable by which processes of a run are found and ended."""


def main(argv: Sequence[str]) -> int | None:
    """Run the program or server in ``argv``; the return value is for ``sys.exit``.

    Raises SystemExit for wrong arguments and an environment that contradicts itself.
    Exceptions of the user's program are passed on, so that Python exits as usual.
    """
    if argv[:1] == [BELOW_WRAPPER]:
        argv = argv[1:]
        if problem := lost_variables(os.environ):
            sys.exit(f"tfcluster: {problem}")
    program = parse(argv[1:]) if argv and argv[0] == "run" else None
    if program is None and list(argv) != ["server"]:
        sys.exit(USAGE)
    _show(" ".join(program.argv) if program else "tfcluster server")
    with _failure_reported():
        if program is None:
            _serve()
        _run(program, own_context())
    return None


def lost_variables(environ: Mapping[str, str]) -> str | None:
    """Why nothing can run in an environment without its variables; None if it can."""
    if MARK in environ:
        return None
    return (
        "the command of 'python' removes variables from the environment, "
        f"{MARK} among them: leave out what does that (--cleanenv, --containall, "
        "--clearenv, env -i)"
    )


def _show(what: str) -> None:
    """Set the process title, so that ``ps`` shows the task and its program."""
    if task := os.environ.get("TFCLUSTER_TASK"):
        set_title(f"{task} {what}", task)


def quieten_tensorflow() -> None:
    """Hide TensorFlow's INFO messages, unless the user has set the log level.

    With N tasks on a host they would appear N times. Warnings and errors are kept.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


@contextmanager
def _failure_reported() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if sentence := cause(error):
            from tfcluster.runtime.files.private_files import cause_of

            others = cause_of(error)
            reporter().failure(f"{sentence} ({others})" if others else sentence)
        raise
    finally:
        reporter().flush()


def own_context() -> Context:
    """The context of this process; ends the process if the variables are wrong."""
    try:
        return context_from(os.environ)
    except ContextError as error:
        sys.exit(f"tfcluster: {error}")


def _serve() -> NoReturn:
    # Imported here, because it imports TensorFlow.
    from tfcluster.runtime.task.serve import serve

    quieten_tensorflow()
    context = own_context()
    try:
        serve(context)
    except ContextError as error:
        sys.exit(f"tfcluster: {error}")


words_drawn = 0
"""The 32-bit words that the libraries' import has drawn from Python's generator, if it
was in the interpreter from which this process was forked."""


def surround(program: Script, context: Context) -> None:
    """Install hooks around the first import of TensorFlow or Keras.

    In a training task, they make ``program`` train on all ranks.
    """
    events = reporter()

    def before_import(name: str) -> None:
        if context.trains:
            backend = os.environ.get("KERAS_BACKEND", "tensorflow")
            injection.refuse_other_backends(backend)
        quieten_tensorflow()
        events.listen()
        events.phase(f"importing {name}")

    def after_import() -> None:
        # The program may have seeded the generator before the import.
        for _ in range(words_drawn):
            random.getrandbits(32)
        events.listen()
        if not context.trains:
            if context.task_type == "evaluator" and SAME_PROGRAM in os.environ:
                injection.refuse_training()
            injection.record(context)
            return
        injection.warn_of_unknown_versions(context)
        _install_tf1(context)
        if not program_kind.is_tf1_script():
            injection.install(context)
        injection.record(context)

    if context.rank_info is not None:
        module_names.install(lambda text: _print_line(context, text))
    if context.trains:
        SIGNALS.install()
        program_kind.read(program, context)
        around_import(("tf_keras",), before=_warn_of_keras_2, after=lambda: None)
    around_import(LIBRARIES, before=before_import, after=after_import)


def _install_tf1(context: Context) -> None:
    """Patch TensorFlow for a TensorFlow 1 script, once TensorFlow is imported."""
    if program_kind.has_tf1_cluster(context) and "tensorflow" in sys.modules:
        from tfcluster.runtime.tf1 import script_hooks

        script_hooks.install(context)


def _warn_of_keras_2(name: str) -> None:
    text = (
        f"the program imports {name}, which is Keras 2: tfcluster can distribute only "
        "Keras 3 models (TF_USE_LEGACY_KERAS=1 makes tf.keras Keras 2)"
    )
    reporter().warning(text)
    sys.stderr.write(f"tfcluster: warning: {text}\n")


def _run(program: Script, context: Context) -> None:
    # First of all, while the process has only one thread.
    if FOLDER in os.environ:
        from tfcluster.runtime.files import private_files

        private_files.install(program, context)
    # A program may hang before it imports anything.
    reporter().listen()
    surround(program, context)
    recording = context.recording
    # Do this before the program's first line, which may set its own seed.
    if program_kind.is_tf1_script():
        if recording is not None:
            seed_generators(recording.seed)
    elif context.trains or recording is not None:
        injection.begin(context)
    run(program)


def _print_line(context: Context, text: str) -> None:
    """Print a line on the console, from the chief only."""
    if context.is_chief:
        sys.stderr.write(f"tfcluster: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

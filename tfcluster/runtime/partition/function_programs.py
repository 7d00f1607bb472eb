"""The programs of all functions that have been called, by the functions' names."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfcluster.runtime.exchange.graph_ops import OP_NAME
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import (
    Function,
    all_nodes,
    function_named,
    op_types,
)
from tfcluster.runtime.partition.programs import Programs, RankProgram
from tfcluster.runtime.partition.rules.random import WITH_STATE, is_draw
from tfcluster.runtime.partition.script_lines import described


class FunctionPrograms:
    """Makes the programs of functions, and says once which are computed whole.

    ``new_programs`` makes the ``Programs`` of a function, given where its random
    numbers get new seeds. If ``strict``, what is otherwise said is raised.
    """

    def __init__(
        self,
        new_programs: Callable[[Function, Callable[[], int]], Programs],
        *,
        seed: int,
        strict: bool,
        note: Callable[[RankProgram], None],
    ) -> None:
        self._make = new_programs
        self._seeds = random.Random(seed)
        self._strict = strict
        self._note = note
        """Called for each program before its first run."""
        self._functions: dict[str, Programs | None] = {}
        self._most_functions = 256
        """When there are so many functions, those that are gone are forgotten."""
        self._without_xla: set[str] = set()
        """The labels of the functions of which that was said."""
        self.noted: list[RankProgram] = []
        """All that have run, in the order of their first run."""

    def of(self, name: str) -> Programs | None:
        """The programs of a function; None if it cannot be read."""
        if name not in self._functions:
            if len(self._functions) >= self._most_functions:
                self._forget()
            try:
                self._functions[name] = self._new_programs(name)
            except Exception as error:
                if self._strict:
                    raise
                self._functions[name] = None
                sys.stderr.write(f"tfcluster: {name} is computed whole: {error}\n")
        return self._functions[name]

    def checked(self, program: RankProgram) -> RankProgram:
        """The program, noted; raises why there is none if it is strict."""
        if program.error is not None and self._strict:
            raise program.error
        if not program.is_noted:
            program.is_noted = True
            self.noted.append(program)
            self._note(program)
            if program.error is not None:
                draws = _draws_of(program)
                reason = f"{program.label} is computed whole: {program.error}{draws}"
                sys.stderr.write(f"tfcluster: {reason}\n")
            is_new = program.label not in self._without_xla
            if is_new and program.xla is not None and program.xla.left:
                self._without_xla.add(program.label)
                sys.stderr.write(f"tfcluster: {_left_by_xla(program)}\n")
        return program

    @contextmanager
    def made_by_all(self, programs: Programs) -> Iterator[None]:
        """A context in which other ranks may fail to make the function's first program.

        With an error of an op, no seeds have been drawn for that program.
        """
        seeds = self._seeds.getstate() if programs.is_unused else None
        try:
            yield
        except tf.errors.OpError:
            if seeds is not None:
                self._seeds.setstate(seeds)
                del self._functions[programs.function.name]
            raise

    def _new_programs(self, name: str) -> Programs | None:
        function = function_named(name)
        if function is None or _exchanges_by_itself(function):
            return None
        return self._make(function, lambda: self._seeds.getrandbits(62) + 1)

    def _forget(self) -> None:
        """Forget functions that TensorFlow has forgotten, and their programs."""
        gone: set[RankProgram] = set()
        for name in list(self._functions):
            if tf_functions.is_registered(name):
                continue
            programs = self._functions.pop(name)
            if programs is not None:
                gone |= set(programs.forget())
        self.noted = [program for program in self.noted if program not in gone]
        self._most_functions = max(256, 2 * len(self._functions))


def _left_by_xla(program: RankProgram) -> str:
    """Which op of a program runs without XLA, though the script asks for it."""
    assert program.xla is not None
    first, *others = program.xla.left
    more = f" (and {len(others)} more)" if others else ""
    draws = any(is_draw(left.node.type) for left in program.xla.left)
    numbers = "; the random numbers it draws are not those of XLA" if draws else ""
    return (
        f"{program.label} runs without XLA in part, though jit_compile is set: "
        f"{described(first.node, program.function)}{more}: {first.reason}{numbers}"
    )


def _draws_of(program: RankProgram) -> str:
    """What to say of the random numbers of a function that is no program."""
    function = function_named(program.function)
    if function is None or WITH_STATE.isdisjoint(op_types(function)):
        return ""
    return "; if it was divided before, its random numbers begin anew"


def _exchanges_by_itself(function: Function) -> bool:
    """Whether the program distributes this function, by exchanges of its own."""
    return any(
        node.op.startswith("Collective")
        or (node.op == "PyFunc" and OP_NAME in node.name)
        for node in all_nodes(function)
    )

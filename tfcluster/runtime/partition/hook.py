"""Where functions run eagerly: there, the program for the ranks runs instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.files.order import pass_point
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.agreement import Agree, agree_on_shapes
from tfcluster.runtime.partition.divided_variables import DividedVariables
from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.function_programs import FunctionPrograms
from tfcluster.runtime.partition.functions import Function, traced_shapes
from tfcluster.runtime.partition.optimizer_slots import OptimizerSlots
from tfcluster.runtime.partition.own_rows import OwnRows
from tfcluster.runtime.partition.part_iterators import DividedInputs, TakenBatch
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.program_inputs import ProgramInput, RowPart
from tfcluster.runtime.partition.programs import Programs, RankProgram
from tfcluster.runtime.partition.row_parts import RowParts, Running
from tfcluster.runtime.partition.script_lines import described
from tfcluster.runtime.partition.table_lookups import made_whole
from tfcluster.runtime.partition.taken_batches import handed
from tfcluster.runtime.partition.variables import VariableNames, Watched
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.tensor_types import Tensor

Call = Callable[[Any, Any, Sequence[Tensor], int], Any]
"""``Context.call_function``: its context, a function's name, inputs, output count."""


Join = Callable[[str, Sequence[Tensor]], list[ProgramInput]]
"""Joins the ranks' rows of a program's batch; see ``agreement.joined``."""
Together = Callable[[str], AbstractContextManager[None]]
"""A context in which an error of one rank is that of all; see ``op_runs.Failures``."""


class Alone(Protocol):
    """What happens around steps of ranks that train on their own rows."""

    def begins(
        self,
        program: RankProgram,
        inputs: Callable[[], Sequence[Watched]],
        variables: Callable[[], Sequence[Any]],
    ) -> None:
        """Called before each run of a program that trains.

        ``inputs`` are all variables that it gets; ``variables`` are the ``tf.Variable``
        objects of its function.
        """

    def ended(self) -> None:
        """Called after each function that has run."""


class Hook:
    """Runs programs in place of functions.

    Only calls by the main thread are divided, and none from within a program: so all
    ranks divide the same calls. While ``is_paused()`` nothing is divided, since other
    ranks may not be calling the function. ``ran`` is called after each program. With
    ``alone``, functions that train compute this rank's rows and exchange nothing. Of
    ``variables``, ranks have their rows only; with ``slots``, also of the optimizers'.
    """

    def __init__(
        self,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None = None,
        *,
        seed: int = 0,
        strict: bool = False,
        agree: Agree | None = None,
        join: Join | None = None,
        is_paused: Callable[[], bool] = lambda: False,
        ran: Callable[[RankProgram], None] = lambda program: None,
        running: Running = lambda label, written: nullcontext(),
        together: Together = lambda label: nullcontext(),
        divided_inputs: DividedInputs | None = None,
        variable_names: VariableNames = dict,
        alone: Alone | None = None,
        variables: DividedVariables | None = None,
        slots: OptimizerSlots | None = None,
    ) -> None:
        self._slots = slots
        self._alone = alone
        self._divided = DividedVariables(ranks) if variables is None else variables
        self._own_rows = None if alone is None else OwnRows(ranks.splits[0])
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._agree = agree
        self._join = join
        self._is_paused = is_paused
        self._ran = ran
        self._running = running
        own_rows = self._own_rows
        exchangers = new_exchanger if own_rows is None else lambda _: own_rows
        self._parts = RowParts(ranks, exchangers, running)
        self._together = together
        self._divided_inputs = divided_inputs or DividedInputs()
        self._variable_names = variable_names
        self._programs = FunctionPrograms(
            self._new_programs, seed=seed, strict=strict, note=self._note
        )
        self._busy = threading.local()

    @property
    def programs(self) -> list[RankProgram]:
        """All programs that have run, in the order of their first run."""
        return self._programs.noted

    # --- the hooks --------------------------------------------------------------------

    def flat_call(
        self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a ``ConcreteFunction``, of which a tape may need more than its outputs.

        Such tensors, which only the function's gradient reads, may stay parts.
        """
        before = getattr(self._busy, "visible", None), self._function()
        self._busy.visible, self._busy.function = len(function.outputs), function
        try:
            return original(function, *args, **kwargs)
        finally:
            self._busy.visible, self._busy.function = before

    def call(
        self,
        original: Call,
        context: Any,
        name: bytes | str,
        inputs: Sequence[Tensor],
        outputs: int,
    ) -> Any:
        """See ``Call``."""
        text = name.decode() if isinstance(name, bytes) else name
        if self._stands_aside():
            tensors = self.whole(inputs)
            self._divided.refuse(tensors, text)
            self._divided_inputs.begin(inputs)
            return original(context, name, tensors, outputs)
        with SIGNALS:
            result = self._call(original, context, text, inputs, outputs)
            if self._alone is not None:
                self._alone.ended()
            return result

    def _call(
        self,
        original: Call,
        context: Any,
        name: str,
        inputs: Sequence[Tensor],
        outputs: int,
    ) -> Any:
        self._busy.now = True
        pass_point()
        try:
            programs = self._programs.of(name)
            values = [self._input(tensor) for tensor in inputs]
            fetched = () if programs is None else programs.fetches
            self._divided_inputs.begin(inputs, fetched)
            if programs is None:
                tensors = self._gathered(values)
                with self._divided.made_whole(tensors, name) as rest:
                    return original(context, name.encode(), rest, outputs)
            taken: list[TakenBatch] = []
            ended: tf.errors.OutOfRangeError | None = None
            with self._as_one(programs, inputs):
                try:
                    for fetch in programs.fetches:
                        taken.append(self._divided_inputs.take(fetch, inputs))
                except tf.errors.OutOfRangeError as error:
                    ended = error
                else:
                    values, program = self._prepared(programs, values, taken)
            if ended is not None:
                # The function itself does what does not wait for the batch. If that
                # were an exchange, the end of the data would break it off.
                whole_batches = [own for batch in taken for own in batch.whole()]
                rest = handed(programs.fetches, whole_batches, inputs)
                self._divided_inputs.begin(rest)
                values = [self._input(tensor) for tensor in rest]
                whole = self._programs.checked(programs.without_batches(values))
                if whole.is_divided and whole.written and whole.written.exchanges:
                    raise ended
                self._make_whole(rest)
                tensors = [tensor for value in values for tensor in value.tensors]
                return original(context, whole.name.encode(), tensors, outputs)
            if program.error is not None:
                tensors = self._gathered(values)
                own, batches = tensors[: len(inputs)], tensors[len(inputs) :]
                rest = handed(programs.fetches, batches, own)
                with self._divided.made_whole(rest, program.label) as rest:
                    return original(context, name.encode(), rest, outputs)
            running: AbstractContextManager[None] = nullcontext()
            if program.written is not None:
                running = self._running(program.label, program.written)
            with running, self._holding(program, programs, values) as held:
                result = original(context, program.name.encode(), held, outputs)
            for index, part in program.parts.items():
                self._parts.note(result[index], part)
            self._ran(program)
            return result
        finally:
            self._busy.now = False

    @contextmanager
    def _holding(
        self, program: RankProgram, programs: Programs, values: Sequence[ProgramInput]
    ) -> Iterator[list[Tensor]]:
        """The inputs, with the pieces of variables that the program gets."""
        if self._slots is None:
            yield [tensor for value in values for tensor in value.tensors]
            return

        def names() -> dict[int, str]:
            return {v.place: v.name for v in programs.variables(values)}

        tensors = [value.tensor for value in values]
        with self._slots.held_as(tensors, program.variables, names) as held:
            yield [
                tensor
                for place, value in enumerate(values)
                for tensor in held.get(place, value.tensors)
            ]

    @contextmanager
    def _as_one(self, programs: Programs, inputs: Sequence[Tensor]) -> Iterator[None]:
        """A context in which batches are taken and compared.

        If one rank cannot compute its rows of a batch, all raise its error. Only the
        others may have made the function's first program, and drawn seeds for it.
        """
        if not self._divided_inputs.of(programs.fetches, inputs):
            yield
            return
        made_by_all = self._programs.made_by_all(programs)
        with made_by_all, self._together(programs.label):
            yield

    def _prepared(
        self,
        programs: Programs,
        values: list[ProgramInput],
        taken: Sequence[TakenBatch],
    ) -> tuple[list[ProgramInput], RankProgram]:
        """The inputs and batches with which all ranks continue, and the program."""
        values = [*values, *(value for batch in taken for value in batch.values)]
        if self._join is not None:
            values = self._joined(self._join, programs, values)
        program = self._program(programs, values)
        if program.on_own_rows:
            assert self._alone is not None
            self._alone.begins(
                program, lambda: programs.variables(values), self._variables
            )
        elif self._agree is not None:
            # Also where nothing is divided, variables may follow from a batch.
            follow = program.assigns and bool(programs.data_places(values))
            if program.is_divided or taken or follow:
                return self._agreed(programs, values, program, taken)
        return values, program

    def _variables(self) -> Sequence[Any]:
        """The ``tf.Variable`` objects of the function that is being called."""
        function = self._function()
        return () if function is None else tf_functions.living_variables(function)

    def _function(self) -> Any:
        """The ``ConcreteFunction`` that is being called, if any."""
        return getattr(self._busy, "function", None)

    def _stands_aside(self) -> bool:
        return (
            getattr(self._busy, "now", False)
            or threading.current_thread() is not threading.main_thread()
            or self._is_paused()
        )

    @contextmanager
    def entering(self) -> Iterator[bool]:
        """A context in which ranks exchange something for Python, if it yields True."""
        if self._stands_aside():
            yield False
            return
        with SIGNALS:
            self._busy.now = True
            pass_point()
            try:
                yield True
            finally:
                self._busy.now = False

    # --- parts ------------------------------------------------------------------------

    @contextmanager
    def keeping_parts(self) -> Iterator[None]:
        """A context in which functions may return parts; see ``part_of``.

        The caller must not show them to the program.
        """
        self._busy.keeps_parts = True
        try:
            yield
        finally:
            self._busy.keeps_parts = False

    @property
    def _keeps_parts(self) -> bool:
        return getattr(self._busy, "keeps_parts", False)

    def part_of(self, tensor: Tensor) -> RowPart | None:
        """What a tensor is a part of; None if it is whole."""
        return self._parts.of(tensor)

    def _input(self, tensor: Tensor) -> ProgramInput:
        divided = self._divided.of(tensor)
        stays = divided is not None and not divided.is_slot
        return ProgramInput(tensor, self._parts.of(tensor), divided if stays else None)

    def whole(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, whole, such as inputs of a call that is not divided.

        Even there a part must never be taken for the whole tensor.
        """
        self._make_whole(inputs)
        if not self._parts or getattr(self._busy, "now", False):
            return inputs
        self._busy.now = True
        try:
            return self._gathered([self._input(tensor) for tensor in inputs])
        finally:
            self._busy.now = False

    def _gathered(self, values: Sequence[ProgramInput]) -> list[Tensor]:
        """The tensors, whole, for a function that cannot be divided."""
        self._make_whole([value.tensor for value in values])
        return self._parts.gathered(values)

    def _make_whole(self, inputs: Sequence[Tensor]) -> None:
        """Gather the variables among the inputs of which ranks hold pieces."""
        if self._slots is not None:
            self._slots.make_whole(inputs)

    # --- programs ---------------------------------------------------------------------

    def _joined(
        self, join: Join, programs: Programs, values: list[ProgramInput]
    ) -> list[ProgramInput]:
        """The inputs and batches; all ranks' batches together are one batch."""
        places = programs.batch_places(values)
        if places:
            joined = join(programs.label, [values[place].tensor for place in places])
            for place, value in zip(places, joined, strict=True):
                values[place] = value
        return values

    def _agreed(
        self,
        programs: Programs,
        values: list[ProgramInput],
        program: RankProgram,
        taken: Sequence[TakenBatch],
    ) -> tuple[list[ProgramInput], RankProgram]:
        """The inputs and batches with which all ranks continue, and the program."""
        assert self._agree is not None
        first = len(values) - sum(len(batch.values) for batch in taken)
        is_equal = self._divided_inputs.is_equal
        is_compared = [not is_equal(value.tensor) for value in values[:first]]
        for batch in taken:
            is_compared += [batch.compared is None] * len(batch.values)
        places = [place for place in programs.data_places(values) if is_compared[place]]
        own = [values[place].tensor for place in places]
        own += [batch.compared for batch in taken if batch.compared is not None]
        agreed = self._agree(
            programs.label, own, programs.variables(values), _words_of(program)
        )
        # On all ranks, if on any.
        differs = any(new is not old for new, old in zip(agreed, own, strict=True))
        if differs:
            shapes = traced_shapes(programs.function, places)
            agree_on_shapes(self._agree, programs.label, shapes)
        if differs and not all(is_compared[first:]):
            whole = [batch.if_it_differs() for batch in taken]
            values = values[:first]
            values += (value for batch in whole for value in batch.values)
            program = self._programs.checked(
                programs.program(values, keeps_parts=self._keeps_parts)
            )
            return self._agreed(programs, values, program, whole)
        for place, tensor in zip(places, agreed, strict=False):
            values[place] = ProgramInput(tensor)
        program = self._program(programs, values)
        words = _words_of(program)
        if words and differs:
            # Only now do all have the program for this batch.
            self._agree(f"{programs.label} with the chief's batch", [], [], words)
        return values, program

    def _new_programs(
        self, function: Function, new_seed: Callable[[], int]
    ) -> Programs:
        return Programs(
            function,
            self._ranks,
            self._new_exchanger,
            new_seed,
            self._variable_names,
            self._visible(function),
            self._own_rows,
            self._slots is not None,
        )

    def _visible(self, function: Function) -> int | None:
        """How many outputs others see than the gradient of this function.

        All of them (None), unless one tape alone follows the call: with a
        ``ForwardAccumulator`` the function gets tangents, too, and returns others.
        """
        called = self._function()
        if called is None or not function.name.startswith(_FORWARD):
            return None
        has_tangents = len(function.arguments) != len(called.inputs)
        if has_tangents or tf_functions.has_higher_gradients(called):
            return None
        visible: int | None = getattr(self._busy, "visible", None)
        return visible

    def _program(
        self, programs: Programs, values: Sequence[ProgramInput]
    ) -> RankProgram:
        """The program for inputs and batches, checked."""
        program = programs.program(values, keeps_parts=self._keeps_parts)
        if not program.is_noted:
            self._divided.note_undivided(programs.variables(values))
        return self._programs.checked(program)

    def _note(self, program: RankProgram) -> None:
        if program.placed is not None:
            nodes = made_whole(program.placed)
            ops = [described(node, program.function) for node in nodes[:3]]
            self._divided.note_whole(program.label, ops)


def _words_of(program: RankProgram) -> Sequence[str]:
    return () if program.written is None else program.written.words


_FORWARD = "__forward_"
"""The beginning of the name of a function whose gradient a tape may need."""

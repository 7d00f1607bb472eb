"""The channel to an agent that srun started, with explanations of srun's messages."""

from __future__ import annotations

from tfcluster.schedulers.process_channel import ProcessChannel
from tfcluster.schedulers.slurm.srun import meaning, own_words

STEP_END_S = 6.0
"""How long Slurm may take to end the processes of a step."""


class StepChannel(ProcessChannel):
    """The standard streams of a step's only task, through our child srun."""

    def kill(self) -> None:
        # srun forwards SIGTERM to the task, whose guard then sweeps, while repeated
        # SIGINT would end the step at once. Only after that, srun itself is killed.
        self.terminate(STEP_END_S)

    def diagnosis(self) -> str:
        """An explanation of srun's end if there is one, with srun's own message."""
        plain = super().diagnosis()
        return explained(self.last_words()) or plain


def explained(said: str) -> str:
    """An explanation of srun's message, followed by the message; "" if unknown."""
    found = meaning(said)
    if found is None:
        return ""
    text, hint = found
    own = own_words(said)
    return f"{text}: {own}; {hint}" if hint else f"{text}: {own}"

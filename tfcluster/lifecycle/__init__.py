"""The life of a run as a pure function: ``step(state, event) -> (state, actions)``.

It knows no clock, socket, file or process: the driver measures time, delivers events
and performs actions.
"""

from tfcluster.lifecycle.step import begin, step
from tfcluster.lifecycle.types import Action, Event, Plan, State

__all__ = ["Action", "Event", "Plan", "State", "begin", "step"]

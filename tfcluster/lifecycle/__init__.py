"""The life of a run as a pure function: ``step(state, event) -> (state, actions)``.

It knows no clock, socket, file or process: the driver measures time, delivers events
and performs actions.
"""

from tfcluster.lifecycle.actions import Action
from tfcluster.lifecycle.events import Event
from tfcluster.lifecycle.state import Plan, State
from tfcluster.lifecycle.step import begin, step

__all__ = ["Action", "Event", "Plan", "State", "begin", "step"]

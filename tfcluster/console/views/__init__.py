"""Views: turn plans, runs and failures into lines of text. Pure.

The lines are safe for terminals: text of tasks, hosts or files is escaped. Times,
including ``now_s``, are Unix times.
"""

from tfcluster.console.views.failures import failure, fold_errors
from tfcluster.console.views.outcome import outcome
from tfcluster.console.views.plan import plan
from tfcluster.console.views.progress import running, starting, stopping
from tfcluster.console.views.status import status, status_line

__all__ = [
    "failure",
    "fold_errors",
    "outcome",
    "plan",
    "running",
    "starting",
    "status",
    "status_line",
    "stopping",
]

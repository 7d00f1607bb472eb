"""What is shown of plans, runs and failures: from data to lines of text, pure.

Every view gives lines that are safe for terminals: whatever tasks, hosts or files said
is escaped in them. Times come in as seconds since the epoch, ``now_s`` among them.
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

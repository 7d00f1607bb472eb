"""Exchanges between the ranks: operations, the group that keeps step, transports.

TensorFlow is not known here.
"""

from tfcluster.runtime.collective.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    NotDistributedError,
    PeerLostError,
)
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.layout import Layout, tensor_words
from tfcluster.runtime.collective.transport import ReduceOp, Transport

__all__ = [
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Group",
    "Layout",
    "NotDistributedError",
    "PeerLostError",
    "ReduceOp",
    "Transport",
    "tensor_words",
]

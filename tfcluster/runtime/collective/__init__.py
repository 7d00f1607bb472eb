"""Collective operations between the ranks: the group, the operations, the transports.

Works on numpy arrays; only ``transports.tensorflow`` imports TensorFlow.
"""

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.signature import Signature, tensor_words
from tfcluster.runtime.collective.transports.base import ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    NotDistributedError,
    PeerLostError,
)

__all__ = [
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Group",
    "HostTransport",
    "NotDistributedError",
    "PeerLostError",
    "ReduceOp",
    "Signature",
    "tensor_words",
]

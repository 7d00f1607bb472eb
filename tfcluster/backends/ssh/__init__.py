"""Hosts that are listed in cluster.yaml, each reached over SSH.

The agent is sent over the same session that it then serves, so hosts need only Python
and sshd.
"""

from __future__ import annotations

from tfcluster.backends.base import Backend
from tfcluster.backends.ssh import paramiko_import as paramiko_import
from tfcluster.backends.ssh.backend import SshBackend

BACKEND: Backend = SshBackend()

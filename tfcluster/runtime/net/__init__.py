"""Authenticated sockets and shared memory between the tasks of one run."""

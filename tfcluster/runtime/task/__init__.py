"""A task's interpreter, from its first line to its exit: scripts and servers."""

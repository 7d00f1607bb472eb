"""A task's interpreter from start to exit: it runs a script or a server."""

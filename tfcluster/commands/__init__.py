"""The implementations of the commands, which ``cli`` calls."""

"""Files that a program writes are as on one machine: only the chief's exist."""

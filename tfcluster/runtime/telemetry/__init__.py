"""A task's reports to its agent: events, step rate, stack dumps, why it ended."""

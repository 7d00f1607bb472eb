"""Metrics and logs over all ranks' rows."""

"""Metrics and logs of all ranks' rows."""

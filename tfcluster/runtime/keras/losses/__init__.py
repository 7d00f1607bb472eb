"""Losses of the whole batch: what a rank's own rows do not determine."""

"""Losses of the whole batch, which a rank's own rows do not determine."""

"""Batch sharding: which rows of a batch belong to a rank, and slicing them."""

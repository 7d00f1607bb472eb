"""The cluster as frozen data, and pure functions from a description to a plan."""

"""Datasets: which data each rank reads, in which order, and from where."""

"""Datasets: what each rank reads, in which order, and from where."""

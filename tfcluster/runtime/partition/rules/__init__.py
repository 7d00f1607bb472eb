"""The rules: which placements an op can compute from which, by families of ops."""

"""Which rows of a batch are a rank's own: plain arithmetic, and slices."""

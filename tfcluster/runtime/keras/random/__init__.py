"""Random numbers: each rank draws those of its rows in the whole batch."""

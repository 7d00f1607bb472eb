"""Random numbers: each rank draws the numbers of its rows in the whole batch."""

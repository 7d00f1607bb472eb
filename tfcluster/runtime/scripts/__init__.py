"""The user's program: how it is run, and what its text says about how it trains."""

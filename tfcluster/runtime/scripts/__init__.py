"""The user's program: running it, and static analysis of how it trains."""

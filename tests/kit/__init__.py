"""What tests use: launches, ranks, one machine as their oracle, and waiting."""

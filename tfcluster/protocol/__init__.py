"""Messages between launcher and agent: one JSON object per line, typed at both ends."""

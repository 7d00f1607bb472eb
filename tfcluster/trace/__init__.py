"""What happened in a run and when, in Chrome's trace event format. Only reads."""

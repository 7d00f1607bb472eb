"""State that layers and metrics keep from step to step, merged over the ranks."""

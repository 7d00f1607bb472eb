"""What becomes of a gradient: all-reduce, parameter servers, or local SGD."""

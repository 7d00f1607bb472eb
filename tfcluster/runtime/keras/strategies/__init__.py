"""What happens to a gradient: all-reduce, parameter servers, or local SGD."""

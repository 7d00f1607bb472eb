"""The fork server: imports TensorFlow once; tasks are forks of it."""

"""The fork server: it imports TensorFlow once, and each task is a fork of it."""

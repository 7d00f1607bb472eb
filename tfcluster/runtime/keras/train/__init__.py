"""Hooks on the Keras methods that train, evaluate and save."""

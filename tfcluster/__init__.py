"""tfcluster: one command that trains an unmodified Keras script on a cluster."""

__version__ = "0.2.0"

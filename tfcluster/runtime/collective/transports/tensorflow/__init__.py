"""The ``tensorflow`` transport: TensorFlow's collective ops carry large vectors.

This is the only package of ``collective`` that imports TensorFlow.
"""

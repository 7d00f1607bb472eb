"""The ``tensorflow`` transport: TensorFlow's own collective ops carry the vectors.

Only this package of ``collective`` knows TensorFlow. Its modules are imported when the
run uses this transport.
"""

"""The ``tensorflow`` transport: TensorFlow's own collective ops carry the vectors.

``bringup``, ``ops`` and ``transport`` alone, of all in ``collective``, know TensorFlow:
they are imported where it is wanted.
"""

"""The Python API on tensors; ``tfcluster.runtime`` offers all of it under one name.

Everything works eagerly, in ``tf.function`` and in graphs of TensorFlow 1.
"""

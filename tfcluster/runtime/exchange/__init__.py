"""The Python API on tensors. All its public names are in ``tfcluster.runtime``.

Everything works eagerly, in ``tf.function`` and in graphs of TensorFlow 1.
"""

"""Variables that live on ps tasks, and the optimizers that are applied to them there.

``client`` is what a training task knows of it, ``service`` what a ps task runs. Keras
is not known here; TensorFlow only to ``update_graph``.
"""

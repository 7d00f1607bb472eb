"""Parameter servers: variables live on ps tasks, and optimizers are applied there.

A training task uses ``client``, a ps task runs ``service``. Knows nothing of Keras;
only ``update_graph`` and its helpers know TensorFlow.
"""

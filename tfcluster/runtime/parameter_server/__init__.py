"""Parameter servers: variables live on ps tasks, and optimizers are applied there.

A training task uses ``client``, and a ps task runs ``service``. The package does not
use Keras; only ``update_graph`` and its helpers use TensorFlow.
"""

"""A hand-written ParameterServerStrategy loop: the chief drives workers and ps."""

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    total = tf.Variable(0.0)


def train() -> tf.Tensor:
    def replica_step() -> tf.Tensor:
        total.assign_add(1.0)
        return tf.constant(1.0)

    return strategy.run(replica_step)


step = tf.function(train)
results = [coordinator.schedule(step) for _ in range(40)]
coordinator.join()
done = sum(result.fetch() for result in results)
print(f"total {float(total):.0f} of {done:.0f} on {total.device}")

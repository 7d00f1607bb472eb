"""A hand-written MultiWorkerMirroredStrategy loop: the same step on every worker."""

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id

with strategy.scope():
    weight = tf.Variable(1.0)


def train(target: tf.Tensor) -> tf.Tensor:
    def replica_step(target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = (weight - target) ** 2
        gradient = tape.gradient(loss, weight)
        context = tf.distribute.get_replica_context()
        weight.assign_sub(0.1 * context.all_reduce("MEAN", gradient))
        return loss

    return strategy.run(replica_step, args=(target,))


step = tf.function(train)
for _ in range(20):
    step(tf.constant(float(rank)))
print(f"rank {rank} of {strategy.num_replicas_in_sync}: {weight.numpy():.4f}")

"""Recognise handwritten digits with asynchronous training steps.

This uses TensorFlow's own ParameterServerStrategy. The script runs on the chief and
distributes steps; TensorFlow servers do the rest. Whichever worker is free computes a
gradient and applies it to the weights, which are on the parameter servers.
"""

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    return parser.parse_args()


def load_data():
    """1,797 images of 64 grey values; the last fifth is for validation."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype("float32") / 16, labels.astype("int32")
    split = len(images) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


class Network(tf.Module):
    """One hidden layer."""

    def __init__(self, inputs, hidden, outputs):
        self.hidden = tf.Variable(random_weights(inputs, hidden))
        self.hidden_bias = tf.Variable(tf.zeros(hidden))
        self.output = tf.Variable(random_weights(hidden, outputs))
        self.output_bias = tf.Variable(tf.zeros(outputs))

    def __call__(self, images):
        hidden = tf.nn.relu(images @ self.hidden + self.hidden_bias)
        return hidden @ self.output + self.output_bias


def random_weights(inputs, outputs):
    shape = (inputs, outputs)
    return tf.random.stateless_normal(shape, seed=shape, stddev=inputs**-0.5)


def mean_loss(network, images, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images))
    return tf.reduce_mean(losses)


def main():
    arguments = parse_arguments()
    training, (images, labels) = load_data()

    # Both read the cluster from TF_CONFIG.
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    with strategy.scope():
        network = Network(inputs=64, hidden=64, outputs=10)
        steps_done = tf.Variable(0, dtype=tf.int64)
    places = sorted({variable.device for variable in network.variables})
    print(f"weights on {' '.join(places)}")

    def endless_batches():
        # No seed: every worker shuffles in its own order.
        rows = tf.data.Dataset.from_tensor_slices(training).shuffle(len(training[0]))
        return rows.repeat().batch(arguments.batch_size)

    def replica_step(batch):
        with tf.GradientTape() as tape:
            loss = mean_loss(network, *batch)
        variables = network.trainable_variables
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(arguments.learning_rate * gradient)
        steps_done.assign_add(1)

    @tf.function
    def step(batches):
        strategy.run(replica_step, args=(next(batches),))

    batches = iter(coordinator.create_per_worker_dataset(endless_batches))
    for _ in range(arguments.steps):
        coordinator.schedule(step, args=(batches,))
    coordinator.join()

    logits = network(images)
    loss = mean_loss(network, images, labels)
    right = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels)
    accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
    workers = cluster.cluster_spec().num_tasks("worker")
    print(f"{int(steps_done)} steps by {workers} workers")
    print(f"validation loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

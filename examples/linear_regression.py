"""Linear regression with a TensorFlow 1 optimizer; each rank has its own rows.

    tfcluster launch -n 4 -- python examples/linear_regression.py

The weights are the same for any number of ranks that divides the number of rows.
"""

import argparse

import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc

tf1 = tf.compat.v1
FEATURES = 20


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=480)
    return parser.parse_args()


def rows_of_this_rank(rows):
    """Noisy values of a linear function; each rank draws all and keeps its part."""
    generator = np.random.default_rng(20)
    inputs = generator.normal(size=(rows, FEATURES))
    slope = np.linspace(-1, 1, FEATURES)[:, None]
    outputs = inputs @ slope + 0.5 + generator.normal(scale=0.1, size=(rows, 1))
    return inputs[tfc.rank() :: tfc.size()], outputs[tfc.rank() :: tfc.size()]


def main():
    arguments = parse_arguments()
    tfc.init()

    inputs = tf1.placeholder(tf.float32, [None, FEATURES])
    outputs = tf1.placeholder(tf.float32, [None, 1])
    weights = tf1.get_variable("weights", [FEATURES, 1])
    bias = tf1.get_variable("bias", [1], initializer=tf1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(inputs @ weights + bias - outputs))

    optimizer = tfc.DistributedOptimizer(tf1.train.AdamOptimizer(0.05))
    train = optimizer.minimize(loss)
    # Only for display: the optimizer averages the gradients itself.
    average_loss = tfc.allreduce(loss)
    begin_alike = tfc.broadcast_global_variables(0)

    own_inputs, own_outputs = rows_of_this_rank(arguments.rows)
    feed = {inputs: own_inputs, outputs: own_outputs}
    with tfc.Session() as session:
        session.run(begin_alike)
        for step in range(arguments.steps):
            _, value = session.run([train, average_loss], feed)
            if tfc.is_chief() and step % 100 == 0:
                print(f"step {step}: average loss {value:.4f}")
        final, slope = session.run([average_loss, weights], feed)
    if tfc.is_chief():
        print(f"average loss {final:.4f}")
        print(f"first weight {slope[0, 0]:.3f}, last weight {slope[-1, 0]:.3f}")


if __name__ == "__main__":
    with tf.Graph().as_default():
        main()

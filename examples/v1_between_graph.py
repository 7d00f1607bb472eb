"""Recognise handwritten digits with a TensorFlow 1 graph, on parameter servers.

Each worker builds its own graph; the variables are on the parameter servers.

    tfcluster launch configs/v1.yaml
"""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

tf.disable_v2_behavior()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500, help="of all workers")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoints", help="folder to keep them in")
    return parser.parse_args()


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    order = np.random.RandomState(1797).permutation(len(images))
    images, labels = images[order], labels[order]
    split = len(images) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def build_model(images):
    with tf.variable_scope("hidden"):
        kernel = tf.get_variable("kernel", [64, 128])
        bias = tf.get_variable("bias", [128], initializer=tf.zeros_initializer())
        hidden = tf.nn.relu(tf.matmul(images, kernel) + bias)
    with tf.variable_scope("digits"):
        kernel = tf.get_variable("kernel", [128, 10])
        bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
        return tf.matmul(hidden, kernel) + bias


def main():
    arguments = parse_arguments()
    training, validation = load_data()

    with tf.device(tf.train.replica_device_setter()):
        global_step = tf.train.get_or_create_global_step()
        images = tf.placeholder(tf.float32, [None, 64])
        labels = tf.placeholder(tf.int64, [None])
        logits = build_model(images)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        correct = tf.equal(tf.argmax(logits, 1), labels)
        accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))
        optimizer = tf.train.AdamOptimizer(2e-3)
        train = optimizer.minimize(loss, global_step=global_step)

    random = np.random.RandomState()
    stop = tf.train.StopAtStepHook(last_step=arguments.steps)
    best = 0.0
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=arguments.checkpoints, hooks=[stop]
    ) as session:
        own = 0
        while not session.should_stop():
            rows = random.choice(len(training[0]), arguments.batch_size)
            batch = {images: training[0][rows], labels: training[1][rows]}
            _, step, value = session.run([train, global_step, loss], batch)
            own += 1
            if own % 50 == 0 and not session.should_stop():
                whole = {images: validation[0], labels: validation[1]}
                reached = session.run(accuracy, whole)
                best = max(best, reached)
                print(f"step {step}: loss {value:.4f}, accuracy {reached:.4f}")
    print(f"best validation accuracy {best:.4f}, after {own} steps of its own")


if __name__ == "__main__":
    main()

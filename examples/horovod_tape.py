"""Train on digits with a custom loop, in a script that was written for Horovod.

Only the import has changed; it was ``import horovod.tensorflow as hvd``.

    tfcluster launch -n 2 -- python examples/horovod_tape.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfcluster.runtime as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoints", default="checkpoints")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    hvd.init()

    # Each process uses the GPU of its local rank.
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        mine = gpus[hvd.local_rank() % len(gpus)]
        tf.config.set_visible_devices(mine, "GPU")

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    dataset = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    dataset = dataset.repeat().shuffle(1500).batch(arguments.batch_size)

    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    losses = keras.losses.SparseCategoricalCrossentropy()
    # The global batch grows with the number of ranks, and so does the learning rate.
    optimizer = keras.optimizers.Adam(0.001 * hvd.size())

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss = losses(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        # Only now have all variables been created.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    steps = arguments.steps // hvd.size()
    for step, (images_of_step, labels_of_step) in enumerate(dataset.take(steps)):
        loss = training_step(images_of_step, labels_of_step, step == 0)
        if step % 50 == 0 and hvd.local_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")

    total = hvd.allreduce(losses(labels[1500:], model(images[1500:])))
    if hvd.rank() == 0:
        tf.train.Checkpoint(model=model, optimizer=optimizer).save(
            arguments.checkpoints
        )
        right = tf.argmax(model(images[1500:]), axis=1) == labels[1500:]
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32))
        print(f"validation loss {total:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

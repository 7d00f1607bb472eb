"""Train on digits with ``model.fit``, in a script that was written for Horovod.

Only the import has changed; it was ``import horovod.tensorflow.keras as hvd``.

    tfcluster launch -n 2 -- python examples/horovod_keras.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfcluster.runtime as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoints", default="digits-{epoch}.weights.h5")
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
    training = (images[:1500], labels[:1500])
    validation = (images[1500:], labels[1500:])
    # Every rank draws its batches from all images, in its own order.
    dataset = tf.data.Dataset.from_tensor_slices(training)
    dataset = dataset.repeat().shuffle(1500).batch(arguments.batch_size)

    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Dropout(0.1),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )

    # The global batch grows with the number of ranks, and so does the learning rate.
    learning_rate = 0.001 * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(learning_rate),
        backward_passes_per_step=1,
        average_aggregated_gradients=True,
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=optimizer,
        metrics=["accuracy"],
    )

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=learning_rate, warmup_epochs=2, verbose=1
        ),
    ]
    # Only one rank writes; the others would overwrite its files.
    if hvd.rank() == 0:
        callbacks.append(
            keras.callbacks.ModelCheckpoint(
                arguments.checkpoints, save_weights_only=True
            )
        )

    model.fit(
        dataset,
        steps_per_epoch=1500 // arguments.batch_size // hvd.size(),
        callbacks=callbacks,
        epochs=arguments.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    if hvd.rank() == 0:
        loss, accuracy = model.evaluate(*validation, verbose=0)
        print(f"validation loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

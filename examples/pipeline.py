"""Recognise handwritten digits that a tf.data pipeline shifts and blurs."""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    return parser.parse_args()


def load_data():
    """1,797 grey images of 8 x 8 pixels, in random order; a fifth is for validation."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.permutation(len(images))
    images, labels = images[order], labels[order]
    split = len(images) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def disturb(image, label):
    """Augment an image; this is the part of preparing the data that takes time."""
    moved = tf.image.random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 1])
    noise = tf.random.normal(tf.shape(image), stddev=0.05)
    return tf.clip_by_value(tf.where(label % 2 == 0, image, moved) + noise, 0, 1), label


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main():
    arguments = parse_arguments()
    keras.utils.set_random_seed(1797)
    training, validation = load_data()
    pipeline = (
        tf.data.Dataset.from_tensor_slices(training)
        .shuffle(len(training[0]))
        .map(disturb, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(arguments.batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    model = build_model()
    model.fit(pipeline, epochs=arguments.epochs, verbose=2)
    loss, accuracy = model.evaluate(*validation, verbose=0)
    print(f"validation loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

"""Recognise handwritten digits with a small convolutional network."""

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--output", type=Path, default=Path(), help="folder for the best model"
    )
    return parser.parse_args()


def load_data():
    """1,797 grey images of 8 x 8 pixels, in random order; a fifth is for validation."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.permutation(len(images))
    images, labels = images[order], labels[order]
    split = len(images) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


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
    arguments.output.mkdir(parents=True, exist_ok=True)
    best = arguments.output / "digits.keras"

    keras.utils.set_random_seed(1797)
    training, validation = load_data()
    model = build_model()
    model.fit(
        *training,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=validation,
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                best, monitor="val_loss", save_best_only=True
            )
        ],
        verbose=2,
    )

    model = keras.models.load_model(best)
    loss, accuracy = model.evaluate(*validation, verbose=0)
    print(f"validation loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

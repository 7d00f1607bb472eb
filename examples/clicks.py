"""Predict clicks from numbers and categories: one large table of embeddings.

The data are made up: whether somebody clicks depends on a few of the numbers, and on
the categories. The categories of all features have rows of one table.
"""

import argparse
import resource

import keras
import numpy as np

NUMBERS = 13


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--width", type=int, default=64, help="of the table")
    parser.add_argument("--features", type=int, default=26, help="with categories")
    parser.add_argument("--examples", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adagrad"))
    parser.add_argument("--model", default="clicks.keras", help="file to save to")
    return parser.parse_args()


def load_data(arguments):
    """Numbers, row numbers of the table, and whether somebody clicked."""
    random = np.random.default_rng(1)
    numbers = random.normal(size=(arguments.examples, NUMBERS)).astype("float32")
    # Some categories are far more frequent than others.
    share = random.random((arguments.examples, arguments.features)) ** 4
    categories = (share * arguments.rows).astype("int32")
    signal = numbers[:, :4].sum(axis=1) + np.where(categories[:, :3] % 2, 1, -1).sum(1)
    return numbers, categories, (signal > 0).astype("float32")


def build_model(arguments):
    numbers = keras.Input((NUMBERS,))
    categories = keras.Input((arguments.features,), dtype="int32")
    dense = keras.layers.Dense(arguments.width, activation="relu")(numbers)
    rows = keras.layers.Embedding(arguments.rows, arguments.width)(categories)
    # Products of all pairs of features, as in DLRM.
    features = keras.layers.Concatenate(axis=1)(
        [keras.layers.Reshape((1, arguments.width))(dense), rows]
    )
    products = keras.layers.Dot(axes=2)([features, features])
    joined = keras.layers.Concatenate()([dense, keras.layers.Flatten()(products)])
    hidden = keras.layers.Dense(64, activation="relu")(joined)
    click = keras.layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model([numbers, categories], click)


def main():
    arguments = parse_arguments()
    keras.utils.set_random_seed(7)
    numbers, categories, clicks = load_data(arguments)
    model = build_model(arguments)
    optimizer = keras.optimizers.get(arguments.optimizer)
    optimizer.learning_rate = 0.05
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    model.fit(
        [numbers, categories],
        clicks,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2,
    )
    model.save(arguments.model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak * 1024 / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()

"""Classify which chapter of Python's reference a passage comes from, by its words.

Words and pairs of neighbouring words are hashed to the rows of one large table; a batch
needs only a few of them. The text is part of Python's standard library.
"""

import argparse
import itertools
import re
import zlib
from pydoc_data.topics import topics

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1 << 17, help="of the table")
    parser.add_argument("--width", type=int, default=32, help="of the table")
    parser.add_argument("--length", type=int, default=24, help="words of a passage")
    return parser.parse_args()


def load_chapters(count=16):
    """The longest chapters, without those that are part of another chapter."""
    chapters = []
    for text in sorted(topics.values(), key=len, reverse=True):
        middle = text[len(text) // 2 :][:200]
        if not any(middle in chapter for chapter in chapters):
            chapters.append(text)
    return chapters[:count]


def load_passages(length, rows):
    """Passages of all chapters, as row numbers of the table, and their chapters."""
    passages, labels = [], []
    for label, text in enumerate(load_chapters()):
        words = re.findall(r"\w+", text.lower())
        for start in range(0, len(words) - length, length // 2):
            passages.append(places(words[start : start + length], rows))
            labels.append(label)
    return np.array(passages, "int32"), np.array(labels, "int32")


def places(words, rows):
    pairs = [" ".join(pair) for pair in itertools.pairwise(words)]
    return [zlib.crc32(text.encode()) % rows for text in (*words, *pairs)]


def build_model(arguments, chapters):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(arguments.rows, arguments.width),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(chapters, activation="softmax"),
        ],
        name="words",
    )
    model.compile(
        # This optimizer changes only the rows that a batch has used.
        optimizer=keras.optimizers.Adagrad(0.5, initial_accumulator_value=1e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main():
    arguments = parse_arguments()
    keras.utils.set_random_seed(1)
    passages, labels = load_passages(arguments.length, arguments.rows)
    order = np.random.permutation(len(passages))
    passages, labels = passages[order], labels[order]
    split = len(passages) * 9 // 10
    model = build_model(arguments, int(labels.max()) + 1)
    model.fit(
        passages[:split],
        labels[:split],
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        verbose=2,
    )
    _, accuracy = model.evaluate(passages[split:], labels[split:], verbose=0)
    print(f"{len(passages)} passages, validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

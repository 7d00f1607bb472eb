"""Hooks that make an unmodified Keras program train on all ranks.

Only this package touches Keras's internals; ``strategies.select.begin`` installs the
hooks. Importing the package itself is cheap: some of its modules do not need Keras.
"""

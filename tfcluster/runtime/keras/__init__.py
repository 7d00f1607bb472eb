"""Makes Keras train on all ranks, without a word in the program.

The only package that touches Keras's internals; ``strategies.select.begin`` puts the
hooks in place. Importing the package costs nothing: some of its modules are pure.
"""

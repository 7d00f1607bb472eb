"""Horovod's own tests of TensorFlow and Keras, run with tfcluster in Horovod's place.

``python -m tests.horovod_suite FOLDER``, where FOLDER is a checkout of Horovod 0.28.1,
or its folder ``test``. This repository has nothing of Horovod, and nothing is
downloaded. The tests import cloudpickle, mock and parameterized: install them before.
"""

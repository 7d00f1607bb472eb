"""Horovod's own tests of TensorFlow and Keras, run with tfcluster in Horovod's place.

``python -m tests.horovod_suite FOLDER``, where FOLDER is a checkout of Horovod 0.28.1 or
its folder ``test``. Nothing of Horovod is part of this repository, and nothing is
downloaded. Its tests import cloudpickle, mock and parameterized, which must be installed.
"""

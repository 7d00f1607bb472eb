"""Transports between ranks: shared memory and sockets, MPI, TensorFlow's ops."""

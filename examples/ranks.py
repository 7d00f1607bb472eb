"""Every rank prints its rank: from a TensorFlow 1 session, and from plain Python.

tfcluster launch -n 4 --set runtime.strategy=none -- python examples/ranks.py
"""

import tensorflow as tf

import tfcluster.runtime as tfc


def main():
    with tf.Graph().as_default(), tfc.Session() as session:
        rank, size = session.run([tfc.rank_op(), tfc.size_op()])
    # The same as Python numbers, which do not need TensorFlow.
    assert (rank, size) == (tfc.rank(), tfc.size())
    print(f"rank {rank}, on its host {tfc.local_rank()} of {tfc.local_size()}")
    tfc.barrier()
    if rank == 0:
        print(f"there are {size} ranks on {tfc.cross_size()} hosts")


if __name__ == "__main__":
    main()

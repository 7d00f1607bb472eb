# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any

"""A cluster within one process: real servers and a thread for each worker."""

import socket
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import tensorflow as tf

from tfcluster.runtime import v1

tf1 = tf.compat.v1
DEADLINE_S = 60


class Cluster:
    """``ps`` parameter servers and ``worker`` workers; keep it while they are used."""

    def __init__(self, ps, worker):
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(ps + worker)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            found = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        self.spec = tf1.train.ClusterSpec({"ps": found[:ps], "worker": found[ps:]})
        self.ps = [self._server("ps", index) for index in range(ps)]
        self.workers = [self._server("worker", index) for index in range(worker)]

    def _server(self, job, index):
        filters = [] if job == "ps" else ["/job:ps", f"/job:worker/task:{index}"]
        return tf1.train.Server(
            self.spec,
            job_name=job,
            task_index=index,
            config=tf1.ConfigProto(device_filters=filters, device_count={"CPU": 2}),
        )

    def members(self):
        return [v1.workers(server) for server in self.workers]

    def session(self, index):
        filters = ["/job:ps", f"/job:worker/task:{index}"]
        config = tf1.ConfigProto(
            device_filters=filters, operation_timeout_in_ms=DEADLINE_S * 1000
        )
        return tf1.Session(self.workers[index].target, config=config)

    def run(self, act):
        """What ``act(rank, workers)`` returns for each worker, in its own graph."""

        def worker(workers):
            with tf.Graph().as_default():
                return act(workers.rank, workers)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(worker, self.members()))


def stacks_after(seconds):
    """Print the stack of every thread to stderr after so many seconds."""

    def tell():
        for thread, frame in sys._current_frames().items():
            sys.stderr.write(f"{thread}\n{''.join(traceback.format_stack(frame))}\n")

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()

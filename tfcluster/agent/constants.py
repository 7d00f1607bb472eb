"""Every bound and interval of the agent, in one place. Knows no mechanism."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20

# Console: what of a task's output passes the channel. The files always get everything.
LINE_BYTES = 16 * KIB
LINES_PER_S = 2000
CONSOLE_BYTES_PER_S = MIB
UPDATE_INTERVAL_S = 0.5  # between two states of a progress bar (lines ended by \r)
LOG_QUEUE_BYTES = 4 * MIB
LOG_FRAME_BYTES = 48 * KIB  # before JSON escapes, which may take 12 for a character

TAIL_LINES = 20
TAIL_CHARS = 2000

# Output pump
READ_BYTES = MIB
PIPE_BYTES = MIB
TRICKLE_BYTES = 64 * KIB  # after a smaller read the pump takes a breath
BREATH_S = 0.02
DRAIN_S = 2.0  # how long output may still come after the exit
QUIET_S = 0.2  # a pipe that is silent for so long after the exit is drained
LOG_RETRY_S = 2.0
LOG_CHECK_S = 1.0

# Channel
OPEN_S = 120.0  # until `open` must have come
EVENT_BYTES = 256 * KIB
EVENT_QUEUE_BYTES = 4 * MIB  # beyond it, what tasks say is dropped
FLUSH_S = 3.0  # for the last frames, to a launcher that does not read

# Processes
SETTLE_S = 0.1  # helpers that end by themselves after their task are not leftovers
LEFTOVER_TERM_S = 1.0
SWEEP_S = 5.0  # then what ignores KILL is reported
SWEEP_INTERVAL_S = 0.02
GUARD_SWEEP_S = 5.0
CLOSE_LOOK_S = 0.02
OTHERS_LOOK_S = 0.1  # each look reads what every process of the user was started with
PUMP_CLOSE_S = 2.0
EXIT_REPORT_S = 4.0  # at most so long waits `exited` for a disk that hangs

LISTEN_POLL_S = 0.05
LISTEN_POLL_MAX_S = 2.0
LISTEN_POLL_IDLE_S = 10.0  # where no task has to listen, and perhaps none ever will
OPEN_FILES = 8192

SYNC_PART_BYTES = 256 * KIB
SYNC_WINDOW_BYTES = MIB  # of files, asked for at a time
SYNC_STALE_S = 3600.0  # what a killed agent has left half received

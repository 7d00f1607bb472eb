"""Every bound and interval of the agent, in one place. Knows no mechanism."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20

# Console: how much of a task's output passes the channel. Files get everything.
LINE_BYTES = 16 * KIB
LINES_PER_S = 2000
CONSOLE_BYTES_PER_S = MIB
UPDATE_INTERVAL_S = 0.5  # between two updates of a progress bar (lines that end in \r)
LOG_QUEUE_BYTES = 4 * MIB
LOG_FRAME_BYTES = 48 * KIB  # before JSON escapes of up to 12 bytes per character

TAIL_LINES = 20
TAIL_CHARS = 2000

# Output capture
READ_BYTES = MIB
PIPE_BYTES = MIB
SMALL_READ_BYTES = 64 * KIB  # after a smaller read, pause for READ_PAUSE_S
READ_PAUSE_S = 0.02
DRAIN_S = 2.0  # how long output may still arrive after the exit
QUIET_S = 0.2  # a pipe that is silent for this long after the exit is drained
LOG_RETRY_S = 2.0
LOG_CHECK_S = 1.0

# Channel
OPEN_S = 120.0  # until `open` must have arrived
EVENT_BYTES = 256 * KIB
EVENT_QUEUE_BYTES = 4 * MIB  # beyond that, events of tasks are dropped
FLUSH_S = 3.0  # to send the last frames to a launcher that does not read

# Processes
SETTLE_S = 0.1  # helpers that end within this time after their task are not leftovers
LEFTOVER_TERM_S = 1.0
SWEEP_S = 5.0  # after that, processes that survive SIGKILL are reported
SWEEP_INTERVAL_S = 0.02
GUARD_SWEEP_S = 5.0
CLOSE_LOOK_S = 0.02
OTHERS_LOOK_S = 0.1  # each look reads the environment of every process of the user
CAPTURE_CLOSE_S = 2.0
EXIT_REPORT_S = 4.0  # how long `exited` waits for a disk that hangs

LISTEN_POLL_S = 0.05
LISTEN_POLL_MAX_S = 2.0
LISTEN_POLL_IDLE_S = 10.0  # if no task has to listen, and perhaps none ever will
GUARD_POLL_S = 0.2  # for how long strangers may reach a server that was just started
GUARD_POLL_SLOW_S = 1.0  # once each task's server is guarded
GUARD_POLL_SHARE = 0.02  # the largest share of the agent's time that polling may take
GUARD_FRESH_S = 3.0  # for how long after a change more listeners may follow
ACCEPT_RETRY_S = 0.5
OPEN_FILES = 8192

SYNC_PART_BYTES = 256 * KIB
SYNC_WINDOW_BYTES = MIB  # of file contents, requested at a time
SYNC_STALE_S = 3600.0  # the age at which a killed agent's incomplete files are removed

# Results. Pieces are small, so that a slow line still passes some frame every few
# seconds: a host that sends no complete frame counts as silent.
RESULT_PIECE_BYTES = 64 * KIB
RESULT_TOLD_S = 2.0  # between two signs of life in a long step
RESULT_FILES = 10_000  # at most, in a listing
RESULT_LOOKS = 500  # entries of a folder that are looked at between other work
RESULT_ROWS = 1_000  # per frame; a path has at most 4096 bytes, mostly far fewer
RESULT_ROW_BYTES = 512 * KIB
RESULT_SHOWN = 100  # refused files that are named; the rest is only counted

USAGE_FIRST_S = 1.0  # between two measurements of what tasks use, at first
USAGE_MAX_S = 10.0  # and later
USAGE_LOOKS = 300  # measurements; after twice as many, the interval doubles, and so on
USAGE_COST_SHARE = 0.005  # of one CPU

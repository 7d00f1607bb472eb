"""What people see: text for terminals, and the one writer that puts it there.

    sanitise   nothing that tasks or hosts say can steer a terminal
    text       durations, columns, tables (pure)
    style      colours, and the prefix of a task's lines (pure)
    views      what is shown of plans, runs and failures (pure)
    stream     one standard stream: what it is, and writing to it
    lane       a thread that writes, a bounded queue before it
    screen     log lines, talk, errors and the live line in their places

Knows nothing of how runs work; ``views`` takes what the record's fold makes of them.
"""

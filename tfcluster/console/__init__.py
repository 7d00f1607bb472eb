"""What users see: text for terminals, and the one writer that puts it there.

    sanitise        makes output of tasks and hosts unable to control a terminal
    text            durations, columns, tables (pure)
    style           colours, and the prefix of a task's lines (pure)
    views           how plans, runs and failures are shown (pure)
    output          the output of commands: data on stdout, messages on stderr
    stream          a standard stream: what it is, and writing to it
    writer_thread   a thread that writes, with a bounded queue
    screen          log lines, messages, errors and the live line of a launch

Knows nothing about how runs work: ``views`` shows what ``record.replay`` returns.
"""

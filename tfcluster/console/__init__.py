"""What users see: text for terminals, and the one writer that puts it there.

    sanitise        makes output of tasks and hosts unable to control a terminal
    text            durations, columns, tables (pure)
    display         what the user wants to see, in which colours (pure)
    views           how plans, runs and failures are shown (pure)
    output          the output of commands: data on stdout, messages on stderr
    writer_thread   a thread that writes to a standard stream, with a bounded queue
    screen          log lines, messages, errors and the live line of a launch

Knows nothing about how runs work: ``views`` shows what ``record.replay`` returns.
"""

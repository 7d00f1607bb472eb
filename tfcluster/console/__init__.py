"""What users see: text for terminals, and the one writer that puts it there.

Knows nothing about how runs work: ``views`` shows what ``record.replay`` returns.
"""

"""Views: turn plans, runs and failures into lines of text. Pure.

The lines are safe for terminals: text of tasks, hosts or files is escaped. Times,
including ``now_s``, are Unix times.
"""

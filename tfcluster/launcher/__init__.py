"""The launcher: gets hosts, starts agents, drives the lifecycle, writes the record.

It never imports TensorFlow, and all threads, clocks and signal handlers of a launch are
here.
"""

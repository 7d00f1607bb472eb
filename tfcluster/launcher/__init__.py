"""The launcher: gets hosts, starts agents, drives the lifecycle, writes the record.

It never imports TensorFlow, and it is the only place where threads, clocks and signals
of a launch are.
"""

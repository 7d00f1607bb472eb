"""Launching outside of an allocation: submits a job and follows it.

What differs from one scheduler to another is in ``tfcluster.schedulers``.
"""

"""Fixtures that tests of every kind may take."""

pytest_plugins = ("tests.testbed.fixtures",)

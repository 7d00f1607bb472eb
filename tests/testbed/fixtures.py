"""Rigs for tests: ``testbed``, one for the whole session, ``testbed_factory`` for more.

A test that takes one has the marker ``testbed``. Where this machine cannot carry a
rig such tests are skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.testbed.commands import Unavailable
from tests.testbed.rig import Options, Testbed

_FIXTURES = {"testbed", "testbed_factory"}

_TIMEOUT_S = 180
_SKIPPED = "no testbed: "

Factory = Callable[[Options], Testbed]


@pytest.hookimpl(tryfirst=True)  # Before -m selects by markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("testbed")
            if item.get_closest_marker("timeout") is None:
                # A rig has deadlines of its own.
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """What a test finds out only on the way is a reason to skip it, too."""
    try:
        return (yield)
    except Unavailable as error:
        pytest.skip(f"{_SKIPPED}{error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Let all that is skipped for want of a rig be one line of the summary."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if _SKIPPED in reason:
            report.longrepr = (__file__, 1, reason)
    return report


@pytest.fixture(scope="session")
def testbed_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Factory]:
    """Puts up a rig of one's own; what is not down in the end is taken down then.

    The session's temporary folders are shared by all hosts.
    """
    with ExitStack() as rigs:

        def up(options: Options) -> Testbed:
            shared = (*options.shared, tmp_path_factory.getbasetemp())
            try:
                return rigs.enter_context(Testbed.up(replace(options, shared=shared)))
            except Unavailable as error:
                pytest.skip(f"{_SKIPPED}{error}")

        yield up


@pytest.fixture(scope="session")
def testbed(testbed_factory: Factory) -> Testbed:
    """Four nodes with sshd, Slurm and Grid Engine, to be left as it was."""
    return testbed_factory(Options(nodes=4, slurm=True, sge=True))


@pytest.fixture
def breakable_testbed(testbed: Testbed) -> Iterator[Testbed]:
    """The same one, repaired after the test."""
    yield testbed
    testbed.repair()

"""Fixtures: ``testbed`` is the session's rig; ``testbed_factory`` starts more rigs.

Tests that use them get the marker ``testbed``. If this machine cannot run a rig, these
tests are skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.rigs.testbed.commands import Unavailable
from tests.rigs.testbed.rig import Options, Testbed

_FIXTURES = {"testbed", "testbed_factory"}

_TIMEOUT_S = 180
_SKIPPED = "no testbed: "

Factory = Callable[[Options], Testbed]


@pytest.hookimpl(tryfirst=True)  # Must run before -m selects by markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("testbed")
            if item.get_closest_marker("timeout") is None:
                # A rig has its own deadlines.
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that raises Unavailable while it runs."""
    try:
        return (yield)
    except Unavailable as error:
        pytest.skip(f"{_SKIPPED}{error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Give all tests skipped for lack of a rig one location, thus one summary line."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if _SKIPPED in reason:
            report.longrepr = (__file__, 1, reason)
    return report


@pytest.fixture(scope="session")
def testbed_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Factory]:
    """Starts a separate rig; rigs that are still up at the end are taken down.

    All hosts share the session's temporary folders.
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
    """Four nodes with sshd, Slurm and Grid Engine; tests must leave it as it was."""
    return testbed_factory(Options(nodes=4, slurm=True, sge=True))


@pytest.fixture
def breakable_testbed(testbed: Testbed) -> Iterator[Testbed]:
    """The session's rig, which is repaired after the test."""
    yield testbed
    testbed.repair()

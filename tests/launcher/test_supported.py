"""What this version cannot launch is refused, all of it at once."""

from __future__ import annotations

import pytest

from tests.planning.descriptions import describe
from tfcluster.errors import ConfigError
from tfcluster.launcher.supported import require_supported
from tfcluster.model import Runtime, Strategy


@pytest.mark.parametrize("strategy", [Strategy.COLLECTIVE, Strategy.NONE])
def test_what_can_be_launched(strategy: Strategy) -> None:
    require_supported(describe({"worker": 2}, runtime=Runtime(strategy=strategy)))


def test_what_cannot_be_is_named_with_its_place() -> None:
    runtime = Runtime(strategy=Strategy.LOCAL_SGD, compression="fp16")
    origins = {"runtime.strategy": "c.yaml:4:13"}
    description = describe({"worker": 2}, runtime=runtime, origins=origins)
    with pytest.raises(ConfigError) as caught:
        require_supported(description)
    (said,) = [str(problem) for problem in caught.value.problems]
    assert said.startswith("c.yaml:4:13: error: runtime.strategy 'local_sgd'")

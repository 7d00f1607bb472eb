"""What the runtime assumes about Keras and TensorFlow, and what it patches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.kit.ranks import Job, Ranks, run_jobs
from tfcluster.base import versions
from tfcluster.runtime import contract
from tfcluster.runtime.contract import HandlerPlace, Patch, PrivateName, Table
from tfcluster.runtime.errors import CollectiveError

LIBRARY = "library_of_the_contract"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    jobs = [Job("keras_contract", 1, "keras_contract.py")]
    return run_jobs(tmp_path_factory.mktemp("contract"), jobs, timeout_s=100)


@pytest.mark.tensorflow
@pytest.mark.timeout(120)
def test_keras_and_tensorflow_are_as_the_runtime_takes_them(
    jobs: Mapping[str, Ranks],
) -> None:
    output = jobs["keras_contract"].outputs[0]
    *_, last = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(last)
    assert len(found) > 30
    assert not {name: text for name, text in found.items() if text != "ok"}


# --- the contract checks, on a library made for these tests ---------------------------


class Base:
    def fit(self, number: int) -> str:
        return f"fit {number}"

    @property
    def size(self) -> str:
        return "size"


class Model(Base):
    def step(self) -> str:
        return "step"


def save(name: str) -> str:
    return f"save {name}"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with two modules that offer the same function."""
    module, other = ModuleType(LIBRARY), ModuleType(f"{LIBRARY}.other")
    base = type("Base", (), {"fit": Base.fit, "size": Base.size})
    model = type("Model", (base,), {"step": Model.step})
    vars(module).update(Base=base, Model=model, save=save, other=other)
    vars(other)["save"] = save
    monkeypatch.setitem(sys.modules, LIBRARY, module)
    monkeypatch.setitem(sys.modules, f"{LIBRARY}.other", other)
    return module


def outer(original: Callable[..., str], *args: Any) -> str:
    return f"outer({original(*args)})"


def middle(original: Callable[..., str], *args: Any) -> str:
    return f"middle({original(*args)})"


def inner(original: Callable[..., str], *args: Any) -> str:
    return f"inner({original(*args)})"


def patch_of(target: str, attribute: str, how: contract.How = "attribute") -> Patch:
    return Patch(f"{LIBRARY}{target}", attribute, "tests", how)


def table(*patches: Patch, aside: bool = False) -> Table:
    return Table(patches, lambda: aside)


PLACES = {
    outer: HandlerPlace.RECORD,
    middle: HandlerPlace.STRATEGY,
    inner: HandlerPlace.LAST,
}


@pytest.mark.parametrize(
    "order", [(outer, middle, inner), (inner, middle, outer), (middle, outer, inner)]
)
def test_the_order_is_that_of_the_places(library: Any, order: Any) -> None:
    patch = patch_of(".Model", "step")
    found = table(patch)
    for handler in order:
        found.install({patch: handler}, PLACES[handler])
    assert library.Model().step() == "outer(middle(inner(step)))"
    assert contract.original_of(patch)(library.Model()) == "step"


def test_an_attribute_is_wrapped_once(library: Any) -> None:
    patch = patch_of(".Model", "step")
    found = table(patch)
    found.install({patch: inner}, HandlerPlace.LAST)
    wrapper = library.Model.step
    for handler in (outer, inner):
        found.install({patch: handler}, PLACES[handler])
    assert library.Model.step is wrapper
    assert wrapper.__name__ == "step"
    assert library.Model().step() == "outer(inner(step))"


def test_handlers_stand_aside_but_those_that_are_always_there(library: Any) -> None:
    patch = patch_of(".Model", "step")
    found = table(patch, aside=True)
    for handler in (outer, middle, inner):
        found.install({patch: handler}, PLACES[handler], always=handler is inner)
    assert library.Model().step() == "inner(step)"


def test_an_inherited_method_is_wrapped_where_it_is_defined(library: Any) -> None:
    patch = patch_of(".Model", "fit", "inherited")
    table(patch).install({patch: outer})
    assert library.Base().fit(3) == "outer(fit 3)"
    assert "fit" not in vars(library.Model)


def test_the_getter_of_a_property_is_wrapped(library: Any) -> None:
    patch = patch_of(".Base", "size", "property")
    found = table(patch)
    found.install({patch: inner}, HandlerPlace.LAST)
    found.install({patch: outer})
    assert library.Model().size == "outer(inner(size))"


def test_a_function_is_replaced_wherever_its_package_offers_it(library: Any) -> None:
    patch = patch_of("", "save", "function")
    table(patch).install({patch: outer})
    assert library.save("x") == library.other.save("x") == "outer(save x)"


def test_one_object_is_changed_and_restored(library: Any) -> None:
    patch = patch_of(".Model", "step", "object's dict")
    found, one = table(patch), library.Model()
    found.replace(patch, one, lambda: "own")
    assert (one.step(), library.Model().step()) == ("own", "step")
    found.restore(patch, one)
    assert one.step() == "step"
    found.restore(patch, one)
    assert one.step() == "step"


def test_only_what_stands_in_the_table_is_patched(library: Any) -> None:
    patch, other = patch_of(".Model", "step"), patch_of(".Model", "fit")
    found = table(patch)
    with pytest.raises(LookupError, match="another table"):
        found.install({other: outer})
    with pytest.raises(ValueError, match="one patch"):
        table(patch, patch)


def test_all_that_is_missing_is_one_error(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.__version__ = "9.9"
    monkeypatch.setitem(versions.OLDEST, LIBRARY, (1, 2))
    monkeypatch.setitem(versions.NEWEST, LIBRARY, (3, 4))
    monkeypatch.setitem(versions._TITLES, LIBRARY, "The library")
    there = PrivateName(f"{LIBRARY}.Model", "fit", "tests")
    word = PrivateName(f"{LIBRARY}.save", "save ", "tests")
    contract.check([there, word])
    gone = PrivateName(f"{LIBRARY}.Model", "_gone", "tests of names")
    unsaid = PrivateName(f"{LIBRARY}.save", "unsaid", "tests of words")
    nowhere = PrivateName(f"{LIBRARY}.nowhere.Model", "", "tests of modules")
    patch = patch_of(".Model", "_step")
    with pytest.raises(CollectiveError) as raised:
        contract.check([there, gone, word, unsaid, nowhere, patch])
    text = str(raised.value)
    assert f"{LIBRARY} 9.9 is installed, 1.2 to 3.4 work" in text
    assert f"  {LIBRARY}.Model._gone: needed for tests of names" in text
    assert f"  {LIBRARY}.save.unsaid: needed for tests of words" in text
    assert f"  {LIBRARY}.nowhere.Model: needed for tests of modules" in text
    assert f"  {LIBRARY}.Model._step: needed for tests" in text
    assert f"pip install '{LIBRARY}>=1.2,<3.5'" in text
    assert "strategy: none" in text
    with pytest.raises(CollectiveError) as raised:
        contract.check([gone], optional=False)
    assert str(raised.value).endswith("or a newer tfcluster")
    assert len(text.splitlines()) == 6

"""Every learner implements the interface, and callers use only the interface."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.gang.learner import GangLearner
from services.trainer.gang.rank_learner import RankLearner
from services.trainer.learning.interface import PolicyLearner
from services.trainer.learning.learner import Learner
from services.trainer.networks.learner import NetworkLearner
from testbed.simulated_learner import SimulatedLearner

LEARNERS = (Learner, RankLearner, GangLearner, NetworkLearner, SimulatedLearner)
ROOT = Path(__file__).resolve().parents[3]
MEMBERS = sorted(name for name in vars(PolicyLearner) if not name.startswith("_"))


def subclasses(kind: type) -> Iterator[type]:
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses(inner)


def parameters(member: object) -> list[tuple[str, object, object]]:
    """Return the name, kind and default of each parameter."""
    assert inspect.isfunction(member)
    found = inspect.signature(member).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


def test_all_learners_of_the_product_are_tested() -> None:
    own = {kind for kind in subclasses(PolicyLearner) if not kind.__module__.startswith("tests.")}
    assert own == set(LEARNERS)


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_learner_implements_all_abstract_members(kind: type) -> None:
    assert not inspect.isabstract(kind)


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("kind", LEARNERS)
def test_a_member_has_the_signature_of_the_interface(kind: type, name: str) -> None:
    expected, member = vars(PolicyLearner)[name], inspect.getattr_static(kind, name)
    if isinstance(expected, property):
        assert isinstance(member, property)
    else:
        assert parameters(member) == parameters(expected)


def test_no_caller_tells_learners_apart_by_their_class() -> None:
    names = {kind.__name__ for kind in (PolicyLearner, *LEARNERS)}
    found = []
    for top in ("services", "testbed"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                        named = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)}
                        found += [f"{path}:{node.lineno}"] if named & names else []
    assert not found

"""Which device class fits which turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.routing import SEEN, Profiles, Rates, classes_for

RATES = {"compute": Rates(20_000, 1000), "bandwidth": Rates(8_000, 1800)}
READER, WRITER = ("games", "player"), ("math", "solver")


def seen(reader: tuple[int, int] = (3000, 20), writer: tuple[int, int] = (200, 1500)) -> Profiles:
    profiles = Profiles()
    for _ in range(SEEN):
        profiles.observe(READER, *reader)
        profiles.observe(WRITER, *writer)
    return profiles


def test_readers_go_to_arithmetic_and_writers_to_bandwidth() -> None:
    assert seen().fitting(READER, RATES) == "compute"
    assert seen().fitting(WRITER, RATES) == "bandwidth"


def test_a_class_that_is_faster_at_everything_does_not_get_everything() -> None:
    rates = {"new": Rates(60_000, 3000), "old": Rates(8_000, 1800)}
    assert seen().fitting(READER, rates) == "new"
    assert seen().fitting(WRITER, rates) == "old"


def test_no_class_of_devices_is_inferred_from_few_turns_or_without_a_difference() -> None:
    assert seen().fitting(("unheard-of", "x"), RATES) is None
    assert seen().fitting(READER, {"compute": RATES["compute"]}) is None
    assert seen(writer=(3000, 20)).fitting(READER, RATES) is None
    young = Profiles()
    for _ in range(SEEN - 1):
        young.observe(READER, 3000, 20)
    assert young.fitting(READER, RATES) is None


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), min_size=SEEN, max_size=60),
    st.integers(1, 2000),
)
def test_property_an_expected_response_lies_within_the_observed_ones(
    turns: list[tuple[int, int]], allowed: int
) -> None:
    profiles = Profiles()
    for read, response in turns:
        profiles.observe(READER, read, response)
    work = profiles.expected(READER, 77, allowed)
    assert work.prompt_tokens == 77
    responses = [response for _, response in turns]
    low, high = min(min(responses), allowed), min(max(responses), allowed)
    assert low - 1e-6 <= work.response_tokens <= high + 1e-6
    unseen = profiles.expected(WRITER, 5, allowed)
    assert (unseen.prompt_tokens, unseen.response_tokens) == (5, allowed)


@pytest.mark.parametrize(
    ("domain", "agent", "default", "inferred", "expected"),
    [
        ("math", "solver", "", None, ("bandwidth",)),
        ("math", "player", "", "compute", ("bandwidth",)),
        ("games", "player", "", "bandwidth", ("compute",)),
        ("", "critic", "pool", "compute", ("compute", "pool")),
        ("", "critic", "pool", None, ("pool",)),
        ("", "critic", "", None, ()),
        ("games", "player", "compute", None, ("compute",)),
    ],
)
def test_declared_comes_before_inferred(
    domain: str, agent: str, default: str, inferred: str | None, expected: tuple[str, ...]
) -> None:
    assert (
        classes_for(
            domain,
            agent,
            by_domain={"math": "bandwidth"},
            by_agent={"player": "compute"},
            default=default,
            inferred=inferred,
        )
        == expected
    )

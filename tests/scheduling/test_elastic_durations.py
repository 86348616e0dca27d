"""How long a call takes: learned from those that it is like, as far as these were alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.elastic import Discipline, Durations, Kin
from troupe.scheduling.elastic.order import FCFS, SHORTEST

NAMES = st.sampled_from(["", "a", "b", "c"])
KIN = st.builds(Kin, NAMES, NAMES, NAMES)
SECONDS = st.floats(0, 1e6)


@given(st.lists(st.tuples(KIN, SECONDS), max_size=40), KIN)
def test_property_a_factor_is_positive_and_finite_and_one_where_nothing_is_known(
    runs: list[tuple[Kin, float]], kin: Kin
) -> None:
    durations = Durations()
    for of, seconds in runs:
        durations.observed(seconds, of)
    assert 0 < durations.factor(kin) < math.inf
    assert 0 < durations.scale() < math.inf
    assert durations.factor(Kin()) == durations.factor(Kin("never seen")) == 1.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=30), KIN)
def test_property_an_estimate_is_never_beyond_what_was_seen(seconds: list[float], kin: Kin) -> None:
    durations = Durations()
    for each in seconds:
        durations.observed(each, kin)
    widest = max(seconds) / min(seconds)
    spread = float(np.var(np.log(seconds)))
    assert math.exp(-spread / 2) / widest * (1 - 1e-9) <= durations.factor(kin)
    assert durations.factor(kin) <= widest * (1 + 1e-9)


def learned(law: Callable[[Kin, np.random.Generator], float], seed: int) -> float:
    """Return the error of expected durations relative to the spread of actual ones: in the later
    half of 40 queries of 8 trajectories, each of which makes each of three calls once."""
    rng = np.random.default_rng(seed)
    durations, errors, logarithms = Durations(), [], []
    for number in range(40):
        for trajectory in range(8):
            for content in "xyz":
                kin = Kin(f"{number}", f"{number}/{trajectory}", content)
                took = law(kin, rng)
                if number >= 20:
                    errors.append(math.log(durations.factor(kin) / took))
                    logarithms.append(math.log(took))
                durations.observed(took, kin)
    return float(np.std(errors) / np.std(logarithms))


@pytest.mark.parametrize("seed", range(3))
def test_unrelated_actions_are_not_predicted_from_each_other(seed: int) -> None:
    alone = learned(lambda kin, rng: float(rng.lognormal(0, 0.8)), seed)
    # The spread bounds every prediction.
    assert alone == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("field", ["query", "content", "trajectory"])
@pytest.mark.parametrize("seed", range(3))
def test_durations_are_predicted_from_related_actions(field: str, seed: int) -> None:
    common: dict[object, float] = {}
    draw = np.random.default_rng(seed + 100)

    def law(kin: Kin, rng: np.random.Generator) -> float:
        key = (kin.query, getattr(kin, field))
        common.setdefault(key, float(draw.normal(0, 0.8)))
        return math.exp(common[key] + float(rng.normal(0, 0.2)))

    # Also counted: the first of each, which is unpredictable.
    assert learned(law, seed) < 0.8


def test_estimates_are_right_on_average() -> None:
    rng, draw = np.random.default_rng(1), np.random.default_rng(2)
    durations, expected, came = Durations(), 0.0, 0.0
    for number in range(300):
        common = float(draw.normal(0, 0.7))
        for trajectory in range(8):
            kin, took = Kin(f"{number}", f"{number}/{trajectory}"), math.exp(common + rng.normal())
            if number >= 100:
                expected, came = expected + durations.factor(kin), came + took
            durations.observed(took, kin)
    mean = math.exp((0.7**2 + 1) / 2)
    assert expected * mean == pytest.approx(came, rel=0.15)


def test_durations_of_repeated_arguments_do_not_predict_other_arguments_of_the_query() -> None:
    """One call again and again, the same each time: another of the same query may be anything."""
    rng, durations = np.random.default_rng(3), Durations()
    for query in range(50):
        for content in "xy":
            seconds = float(rng.lognormal(0, 0.8))
            for _ in range(6):
                durations.observed(seconds, Kin(f"{query}", "", content))
    known, other = Kin("49", "", "y"), Kin("49", "", "z")
    assert abs(math.log(durations.factor(known) / seconds)) < 0.6
    assert 0.5 < durations.factor(other) < 2


def test_declared_seconds_need_not_be_seconds_of_this_machine() -> None:
    discipline = Discipline()
    assert discipline.expected("f", Kin(), 1.0, declared=7.0) == 7.0
    for size in range(1, 200):
        discipline.took("f", Kin(), 0.02 * size, declared=float(size))
    assert discipline.expected("f", Kin(), 1.0, declared=50.0) == pytest.approx(1.0, rel=0.1)
    assert discipline.expected("g", Kin(), 3.0, declared=50.0) == 50.0


def test_one_call_with_a_tiny_declared_duration_does_not_change_the_estimate() -> None:
    discipline = Discipline()
    for _ in range(200):
        discipline.took("f", Kin(), 10.0, declared=10.0)
    discipline.took("f", Kin(), 1.0, declared=0.001)
    assert discipline.expected("f", Kin(), 1.0, declared=10.0) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("work", [math.inf, math.nan])
def test_work_without_end_goes_last_and_tells_nothing_of_others(work: float) -> None:
    told, other = Discipline(patience=50.0), Discipline(patience=50.0)
    assert told.place(1.0, "job", "", work) == 51.0
    for discipline in (told, other):
        discipline.place(2.0, "job", "", 3.0)
    assert told.place(3.0, "job", "", 4.0) == other.place(3.0, "job", "", 4.0) < 53.0


def test_functions_that_are_remembered_are_bounded() -> None:
    discipline = Discipline()
    for number in range(100):
        discipline.took(f"{number}", Kin(), 1.0, declared=1.0)
    assert len(discipline._durations) == 64


def test_remembered_durations_are_bounded() -> None:
    durations = Durations()
    for number in range(5000):
        durations.observed(1.0 + number % 7, Kin(f"{number}", f"{number}", "same"))
    levels = (durations._queries, durations._contents, durations._trajectories)
    assert [len(level._means) for level in levels] == [4096, 1024, 1024]


@pytest.mark.parametrize("multiple", [-1.0, math.nan, math.inf])
def test_invalid_multiples_are_refused(multiple: float) -> None:
    with pytest.raises(ValueError, match="times what was expected"):
        Durations().observed(multiple)


@given(
    st.lists(
        st.tuples(NAMES, NAMES, st.floats(1e-3, 1e6), st.floats(0, 100), st.booleans()),
        min_size=2,
        max_size=25,
    )
)
def test_property_with_learned_durations_no_call_is_passed_by_one_that_comes_after_its_patience(
    asked: list[tuple[str, str, float, float, bool]],
) -> None:
    discipline, now, places = Discipline(patience=50.0), 0.0, []
    for query, trajectory, seconds, pause, last in asked:
        now += pause
        kin = Kin(query, trajectory)
        expected = discipline.expected("f", kin, 1.0)
        place = discipline.place(now, "job", trajectory, expected, last=last, query=query)
        places.append((place, now))
        discipline.took("f", kin, seconds)
        discipline.ran("job", trajectory, seconds, last=last, function="f")
    assert all(came <= place <= came + 50.0 for place, came in places)
    for place, came in places:
        assert all(place <= other for other, late in places if late >= came + 50.0)


def test_a_query_whose_calls_take_long_has_more_left() -> None:
    def places(order: str) -> list[float]:
        discipline = Discipline(order)  # type: ignore[arg-type]
        for number in range(24):
            query, seconds = ("slow", 100.0) if number % 2 else ("fast", 1.0)
            kin = Kin(query, f"{number}")
            for last in (False, True):
                discipline.place(0.0, "job", f"{number}", seconds, last=last, query=query)
                discipline.took(f"f{last}", kin, seconds)
                discipline.ran("job", f"{number}", seconds, last=last, function=f"f{last}")
        return [
            discipline.place(0.0, "job", f"next {query}", 1.0, query=query)
            for query in ("slow", "fast")
        ]

    slow, fast = places(SHORTEST)
    assert slow > 2 * fast
    assert places(FCFS) == [0.0, 0.0]

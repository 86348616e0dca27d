"""The choice of opponents for learners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.populations.opponents import (
    LeagueMember,
    LeagueRules,
    is_due,
    league_opponents,
    past_selves,
)

MAIN = LeagueMember("main", "main", frozen=False)
HUNTER = LeagueMember("hunter", "main_exploiter", frozen=False)
SPY = LeagueMember("spy", "league_exploiter", frozen=False)
M1, M2 = (LeagueMember(f"main@{i}", "main", parent="main") for i in (1, 2))
H1 = LeagueMember("hunter@1", "main_exploiter", parent="hunter")
ALL = (MAIN, HUNTER, SPY, M1, M2, H1)


def test_earlier_selves() -> None:
    assert past_selves(4).tolist() == [0, 0, 0, 1]
    assert past_selves(4, delta=0.5).tolist() == [0, 0, 0.5, 0.5]
    assert past_selves(4, delta=1).tolist() == [0.25] * 4
    assert past_selves(1, delta=0.3).tolist() == [1]
    for versions, delta in ((0, 0.0), (3, 1.5), (3, float("nan"))):
        with pytest.raises(ValueError, match="delta"):
            past_selves(versions, delta=delta)


def test_a_main_agent_meets_itself_and_whom_it_does_not_beat() -> None:
    wins = {("main", "main@1"): 1.0, ("main", "main@2"): 0.5, ("main", "hunter@1"): 0.0}
    found = league_opponents(MAIN, ALL, wins)
    assert found["main"] == pytest.approx(0.35)
    assert found["main@1"] == 0
    # PFSP: (1 - 0.5)^2 to 1; in addition, the members that exploited it.
    assert found["main@2"] == pytest.approx(0.5 * 0.2)
    assert found["hunter@1"] == pytest.approx(0.5 * 0.8 + 0.15)
    assert league_opponents(MAIN, [MAIN], {}) == {"main": 1.0}


def test_a_main_exploiter_meets_the_main_agents_or_their_past_while_it_has_no_chance() -> None:
    assert league_opponents(HUNTER, ALL, {("hunter", "main"): 0.4}) == {"main": 1.0}
    wins = {("hunter", "main"): 0.1, ("hunter", "main@1"): 0.5, ("hunter", "main@2"): 1.0}
    found = league_opponents(HUNTER, ALL, wins)
    assert found == pytest.approx({"main": 0.5, "main@1": 0.5, "main@2": 0.0})


def test_a_league_exploiter_meets_all_that_is_frozen() -> None:
    found = league_opponents(SPY, ALL, {})
    assert found == pytest.approx(dict.fromkeys(("main@1", "main@2", "hunter@1"), 1 / 3))
    with pytest.raises(ValueError, match="no opponent"):
        league_opponents(SPY, [MAIN, SPY], {})


def test_a_learner_that_beats_all_opponents_is_frozen() -> None:
    beaten = {("main", one.name): 0.7 for one in (M1, M2, H1)}
    assert is_due(MAIN, ALL, beaten, 0)
    assert not is_due(MAIN, ALL, {**beaten, ("main", "main@2"): 0.69}, 0)
    assert not is_due(MAIN, ALL, {("main", "main@1"): 1.0}, 0), "it has not met the others"
    assert not is_due(MAIN, [MAIN], {}, 0)
    assert is_due(MAIN, [MAIN], {}, 10, LeagueRules(freeze_after=10))
    assert is_due(HUNTER, ALL, {("hunter", "main"): 0.8}, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from([one.name for one in ALL]), st.sampled_from([one.name for one in ALL])
        ),
        st.floats(0, 1),
    ),
    st.sampled_from([MAIN, HUNTER, SPY]),
)
def test_league_opponents_are_a_distribution_over_existing_members(
    wins: dict[tuple[str, str], float], learner: LeagueMember
) -> None:
    found = league_opponents(learner, ALL, wins)
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) >= 0
    assert set(found) <= {one.name for one in ALL} - {"hunter", "spy"}

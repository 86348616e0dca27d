"""How often training state becomes durable: bounded by its cost, and without unbounded growth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling.durability import MOST_STEPS, StateCosts, StatePlan, is_due, plan_states

SECONDS = st.floats(0, 1e5)
MEASURED = st.builds(
    StateCosts,
    writing=st.none() | SECONDS,
    copying=st.none() | SECONDS,
    step=st.none() | SECONDS,
)


@given(every=st.none() | st.integers(1, 64), background=st.booleans(), costs=MEASURED)
def test_settings_of_the_job_hold_and_defaults_are_bounded(
    every: int | None, background: bool, costs: StateCosts
) -> None:
    plan = plan_states(every, background, costs)
    assert 1 <= plan.every <= MOST_STEPS
    if every is not None:
        assert plan == StatePlan(every, background)
    if not background:
        assert not plan.background


@given(writing=SECONDS, copying=SECONDS, step=st.floats(1e-2, 1e5))
def test_long_writes_take_a_bounded_share_of_the_time(
    writing: float, copying: float, step: float
) -> None:
    plan = plan_states(None, True, StateCosts(writing, copying, step))
    if writing <= 0.5 or writing <= 0.05 * step:
        assert plan == StatePlan(1, background=False)
    elif plan.every < MOST_STEPS:
        assert writing <= 0.501 * plan.every * step
        assert copying <= 0.021 * plan.every * step


def test_examples() -> None:
    assert plan_states(None, True, StateCosts()) == StatePlan(1, background=False)
    assert plan_states(None, True, StateCosts(0.03, 0.01, 1.0)) == StatePlan(1, background=False)
    # 4B parameters on a slow disk; 32B on a fast one.
    assert plan_states(None, True, StateCosts(48.0, 2.0, 60.0)) == StatePlan(2, background=True)
    assert plan_states(None, True, StateCosts(200.0, 12.0, 300.0)) == StatePlan(2, background=True)


@given(every=st.integers(1, 64), writes=st.lists(st.integers(0, 200), min_size=1, max_size=50))
def test_steps_that_are_not_on_disk_are_bounded_however_slow_the_disk_is(
    every: int, writes: list[int]
) -> None:
    """`writes`: steps that each write lasts. A state that is due while one is written waits."""
    plan, begun, busy_until, durations = StatePlan(every, True), 0, 0, iter(writes)
    for version in range(1, 300):
        writing = version < busy_until
        if is_due(plan, version - begun, over_high_water=False, writing=writing):
            # The trainer waits for the writer here; then its time is over.
            begun, busy_until = version, version + next(durations, 0)
        assert version - begun < 2 * every
    assert is_due(plan, 1, over_high_water=True, writing=False)

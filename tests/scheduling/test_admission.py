from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling import admission

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds, st.integers(0, 50), st.integers(1, 20), st.integers(1, 8))
def test_a_step_can_be_planned_again(seed: int, step: int, queries: int, group: int) -> None:
    def plan() -> tuple[admission.QueryPlan, ...]:
        return admission.plan_step(
            job_seed=seed, step=step, queries_per_step=queries, group_size=group
        )

    assert plan() == plan()


@given(seeds, st.integers(1, 6), st.integers(1, 10), st.integers(1, 6))
def test_steps_cover_the_split_in_order_and_once(
    seed: int, steps: int, queries: int, group: int
) -> None:
    plans = [
        plan
        for step in range(steps)
        for plan in admission.plan_step(
            job_seed=seed, step=step, queries_per_step=queries, group_size=group
        )
    ]
    assert [plan.index for plan in plans] == list(range(steps * queries))
    ids = [trajectory for plan in plans for trajectory in plan.trajectory_ids]
    assert len(set(ids)) == steps * queries * group
    all_seeds = [one for plan in plans for one in plan.seeds]
    assert len(set(all_seeds)) == len(all_seeds)
    assert all(0 <= one < 2**63 for one in all_seeds)


@given(seeds, st.integers(0, 30), st.integers(0, 30), st.integers(0, 20))
def test_evaluations_compare(seed: int, before: int, after: int, queries: int) -> None:
    one = admission.plan_evaluation(job_seed=seed, step=before, queries=queries)
    two = admission.plan_evaluation(job_seed=seed, step=after, queries=queries)
    assert [(p.query_id, p.index, p.seeds) for p in one] == [
        (p.query_id, p.index, p.seeds) for p in two
    ]
    if before != after:
        ids = {plan.trajectory_ids for plan in one}
        assert ids.isdisjoint(plan.trajectory_ids for plan in two)


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(0, 60), st.integers(1, 40))
def test_waves_obey_the_limit_and_never_starve(
    sizes: list[int], in_flight: int, limit: int
) -> None:
    count = admission.next_wave(sizes, in_flight=in_flight, limit=limit)
    started = sum(sizes[:count])
    assert in_flight + started <= max(limit, in_flight) or (in_flight == 0 and count == 1)
    if sizes and in_flight == 0:
        assert count >= 1
    if count < len(sizes):
        assert in_flight + started + sizes[count] > limit


@given(
    st.integers(0, 20),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), min_size=1),
    st.integers(0, 3),
)
def test_a_step_opens_when_every_policy_is_within_the_bound(
    step: int, committed: dict[str, int], alpha: int
) -> None:
    late = admission.holding_back(step, committed, alpha=alpha)
    assert set(late) == {p for p, done in committed.items() if step - done > alpha}
    assert list(late) == sorted(late)


def test_failures_are_bounded_by_a_fraction() -> None:
    assert not admission.too_many_failed(5, 10, 0.5)
    assert admission.too_many_failed(6, 10, 0.5)
    assert not admission.too_many_failed(10, 10, 1.0)
    assert admission.too_many_failed(1, 10, 0.0)

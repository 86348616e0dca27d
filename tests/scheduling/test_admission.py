from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.scheduling import admission
from troupe.scheduling.curriculum import number_of

seeds = st.integers(-(2**63), 2**63 - 1)


def plan(seed: int, first: int, count: int, step: int | None) -> tuple[admission.QueryPlan, ...]:
    ids = map(admission.query_id_of, range(first, first + count))
    return admission.plan_queries(ids, job_seed=seed, group_size=3, step=step)


@given(seeds, st.integers(0, 50), st.integers(1, 20), st.none() | st.integers(0, 9))
def test_queries_can_be_planned_again(seed: int, first: int, count: int, step: int | None) -> None:
    planned = plan(seed, first, count, step)
    assert planned == plan(seed, first, count, step)
    assert [one.index for one in planned] == list(range(first, first + count))
    assert [number_of(one.query_id) for one in planned] == [one.index for one in planned]
    ids = [trajectory for one in planned for trajectory in one.trajectory_ids]
    assert len(set(ids)) == count * 3
    all_seeds = [number for one in planned for number in one.seeds]
    assert len(set(all_seeds)) == len(all_seeds)
    assert all(0 <= number < 2**63 for number in all_seeds)


@given(seeds, st.integers(0, 50), st.integers(0, 9), st.integers(0, 9))
def test_seeds_of_a_query_do_not_depend_on_the_step(
    seed: int, index: int, one: int, two: int
) -> None:
    assert plan(seed, index, 1, one)[0].seeds == plan(seed, index, 1, two)[0].seeds
    assert plan(seed, index, 1, None)[0].trajectory_ids[0] == f"q{index}-t0"
    assert plan(seed, index, 1, one)[0].trajectory_ids[0] == f"q{index}-s{one}-t0"


@pytest.mark.parametrize("name", ["", "q", "h3", "q-1", "q1x"])
def test_only_training_queries_have_an_index(name: str) -> None:
    with pytest.raises(ValueError, match="was not planned here"):
        number_of(name)


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
    count = admission.groups_that_fit(sizes, in_flight=in_flight, limit=limit)
    started = sum(sizes[:count])
    assert in_flight + started <= max(limit, in_flight) or (in_flight == 0 and count == 1)
    if sizes and in_flight == 0:
        assert count >= 1
    if count < len(sizes):
        assert in_flight + started + sizes[count] > limit


counts = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 20), min_size=1)
bounds = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))


@given(st.integers(0, 20), counts, bounds)
def test_a_step_opens_when_every_policy_is_within_its_bound(
    step: int, committed: dict[str, int], alpha: dict[str, int]
) -> None:
    late = admission.holding_back(step, committed, alpha)
    assert set(late) == {p for p, done in committed.items() if step - done > alpha.get(p, 0)}
    assert list(late) == sorted(late)


def test_a_bound_is_not_negative() -> None:
    with pytest.raises(ValueError, match="alpha of a"):
        admission.holding_back(0, {"a": 0}, {"a": -1})


@given(st.integers(0, 20), counts, bounds, st.data())
def test_a_trajectory_of_an_open_step_is_never_too_old_for_it(
    step: int, committed: dict[str, int], alpha: dict[str, int], data: st.DataObject
) -> None:
    """By induction: a policy has as many versions as steps, or fewer where one was skipped."""
    if admission.holding_back(step, committed, alpha):
        return
    versions = {p: data.draw(st.integers(0, done), label=p) for p, done in committed.items()}

    def old(started: dict[str, int], in_step: int) -> bool:
        return admission.too_old(
            started, in_step, committed=committed, versions=versions, alpha=alpha
        )

    assert not old(versions, step)
    assert not old({}, step + 100)
    policy = data.draw(st.sampled_from(sorted(committed)))
    past = {policy: versions[policy] - alpha.get(policy, 0) - 1}
    assert old(past, max(step, committed[policy]))


def test_failures_are_bounded_by_a_fraction() -> None:
    assert not admission.too_many_failed(5, 10, 0.5)
    assert admission.too_many_failed(6, 10, 0.5)
    assert not admission.too_many_failed(10, 10, 1.0)
    assert admission.too_many_failed(1, 10, 0.0)


def test_tokens_are_kept_of_one_query_a_step_and_the_first_of_an_evaluation() -> None:
    def kept(plans: Iterable[admission.QueryPlan]) -> list[str]:
        return [
            one
            for plan in plans
            for one in plan.trajectory_ids
            if admission.keeps_tokens(one, queries_per_step=4)
        ]

    plans = admission.plan_queries([f"q{n}" for n in range(8)], job_seed=0, group_size=10, step=2)
    assert kept(plans) == [f"q{q}-s2-t{n}" for q in (0, 4) for n in range(8)]
    plans = admission.plan_queries(["q8-w0.3", "q9"], job_seed=0, group_size=1, step=None)
    assert kept(plans) == ["q8-w0.3-t0"], "of a curriculum too"
    plans = admission.plan_evaluation(job_seed=0, step=5, queries=9, samples=1, name="a-h1")
    assert kept(plans) == [f"a-h1-h{q}-e5-t0" for q in range(4)]
    assert not admission.keeps_tokens("m0x1-t1", 1)


def test_texts_are_kept_of_a_share_of_training_and_of_the_first_of_an_evaluation() -> None:
    names = [f"q{q}-s{s}-t{t}" for q in range(100) for s in range(10) for t in range(8)]
    kept = [one for one in names if admission.keeps_text(one, wanted=80, of=800, samples=1)]
    assert 700 < len(kept) < 900
    # The same for every step, query and place in a group: drawn without bias.
    for part in (f"-s{n}-" for n in range(10)):
        assert 50 < sum(part in one for one in kept) < 110
    assert all(admission.keeps_text(one, wanted=800, of=800, samples=1) for one in names)
    assert not any(admission.keeps_text(one, wanted=0, of=800, samples=1) for one in names)
    plans = admission.plan_evaluation(job_seed=0, step=5, queries=9, samples=2, name="a")
    evaluated = [one for plan in plans for one in plan.trajectory_ids]

    def of_evaluation(wanted: int) -> list[str]:
        return [n for n in evaluated if admission.keeps_text(n, wanted=wanted, of=8, samples=2)]

    assert of_evaluation(12) == evaluated[:12]
    assert of_evaluation(0) == [f"a-h{q}-e5-t0" for q in range(admission.COMPARED)]

"""Claims: full micro-batches, waiting, leases, and who may hold what."""

from __future__ import annotations

from tests.support.experience import Response, Stage, ids_of

CLAIMED, WAIT, EXHAUSTED = (
    Response.OUTCOME_CLAIMED,
    Response.OUTCOME_WAIT,
    Response.OUTCOME_EXHAUSTED,
)


async def test_a_step_from_append_to_commit(stage: Stage) -> None:
    assert (await stage.claim()).outcome == WAIT
    for query, trajectory in stage.trajectories:
        assert await stage.append(query, trajectory)
    response = await stage.claim(claim="c1")
    assert response.outcome == CLAIMED
    assert ids_of(response) == sorted(f"{q}_1_{t}" for q, t in stage.trajectories)
    assert all(list(claimed.group_rewards) == [1.0, 1.0] for claimed in response.samples)
    assert await stage.counts() == {"claimed": 4}
    assert (await stage.claim()).outcome == EXHAUSTED
    commit, existed = await stage.commit(["c1"])
    assert (commit.num_samples, existed) == (4, False)
    assert await stage.counts() == {"trained": 4}
    assert await stage.counts("checker") == {"ready": 4}

"""Policies that are networks: verified weights, whole episodes, one row per trained policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.networks import arena
from services.rollout.trajectories.records import INLINE_BYTES
from tests.rollout.house import House, evaluation, open_house, training
from tests.rollout.processes import ServiceProcess
from tests.rollout.test_rollout_aborting import abort
from tests.support import arenas
from tests.support.waiting import PATIENCE, until
from troupe import tensors
from troupe.job import JobSpec, NetworkSpec
from troupe.networks.acting import ActingNetwork
from troupe.networks.environments.openspiel import histories_of
from troupe.networks.fragments import SHAPES, Fragment
from troupe.networks.jobs import environment_of
from troupe.networks.vector import Spaces
from troupe.rpc import FailedPrecondition, InvalidArgument, TroupeError, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb

COMPLETED = common_pb.TRAJECTORY_STATE_COMPLETED
FAILED = common_pb.TRAJECTORY_STATE_FAILED
ABORTED = common_pb.TRAJECTORY_STATE_ABORTED
NETWORK: dict[str, Any] = {"hidden": [4], "learning": {"paradigm": "ppo"}}
SPACES = Spaces(observation=4, state=4, actions=2, steps=2)


@pytest.fixture
async def house(tmp_path: Path, store_process: ServiceProcess) -> AsyncIterator[House]:
    arenas.RELEASED.clear()
    async with open_house(tmp_path, store=store_process.address) as house:
        yield house
    arenas.RELEASED.set()


def _spec(source: str = "Agree", **changes: Any) -> JobSpec:
    """Two agents; `big` plays the first, `small` the second."""
    return JobSpec.model_validate(
        {
            "name": "test",
            "environment": {"source": f"tests.support.arenas:{source}", "copies": 3},
            "agents": {"agent_0": {"policy": "big"}, "agent_1": {"policy": "small"}},
            "policies": {"big": {"network": NETWORK}, "small": {"network": NETWORK}},
            "pipeline": {"steps": 1, "queries_per_step": 2},
            "limits": {"turn_seconds": PATIENCE, "trajectory_seconds": PATIENCE},
            **changes,
        }
    )


def _weights(seed: int, spaces: Spaces = SPACES, agents: int = 1) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = ActingNetwork(NetworkSpec.model_validate(NETWORK), spaces, agents)
    return dict(network.state_dict())


def _publish(
    house: House, policy: str, version: int, tensors: dict[str, torch.Tensor]
) -> common_pb.WeightsRef:
    key = f"{house.job_id}/{policy}/weights@{version}"
    manifest = house.transfer.set(key, tensors)
    return common_pb.WeightsRef(
        job_id=house.job_id,
        policy=policy,
        version=version,
        key=key,
        checksum=manifest.checksum,
        num_bytes=manifest.num_bytes,
    )


async def _prepare(
    house: House, spec: JobSpec, spaces: Spaces = SPACES
) -> list[common_pb.WeightsRef]:
    refs = [_publish(house, n, 0, _weights(i, spaces)) for i, n in enumerate(("big", "small"))]
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id(), job_id=house.job_id, spec_json=spec.model_dump_json(), weights=refs
    )
    await house.rollout.PrepareJob(request, timeout=PATIENCE)
    return refs


def _arrays(house: House, row: store_pb.Sample) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for name, column in row.columns.items():
        if column.ref:
            found[name] = house.transfer.get(column.ref)[0]["value"].numpy()
        else:
            found[name] = tensors.from_proto(column.tensor)
    return found


async def test_a_ticket_is_one_fragment_of_each_trained_policy(house: House) -> None:
    spec = _spec(policies={"big": {"network": NETWORK}, "small": {"network": NETWORK}})
    refs = await _prepare(house, spec)
    await house.open_step(queries=2, group_size=1)
    ended = await house.run(training(2, 1))
    assert {e.state for e in ended.values()} == {COMPLETED}, ended
    for event in ended.values():
        assert dict(event.start_versions) == {"big": 0, "small": 0}
        assert event.metrics["environment_steps"] == 6
        assert event.metrics["environment_steps_per_second"] > 0
    engines = (
        await house.rollout.ListEngines(rollout_pb.ListEnginesRequest(job_id=house.job_id))
    ).engines
    assert {(e.policy, e.kind, e.version, e.checksum) for e in engines} == {
        (ref.policy, "network", 0, ref.checksum) for ref in refs
    }
    for policy, agent in (("big", "agent_0"), ("small", "agent_1")):
        rows = await house.samples(policy)
        assert {row.trajectory_id for row in rows} == set(ended)
        for row in rows:
            fragment = Fragment(policy, 0, (agent,), _arrays(house, row))
            assert set(fragment.arrays) <= set(SHAPES)
            assert (fragment.episodes, fragment.steps) == (3, 6)
            means = ended[row.trajectory_id].rewards
            assert means[agent] == pytest.approx(fragment.returns().mean())
            assert row.reward == pytest.approx(means[agent])
            assert [(s.version, s.start, s.end) for s in row.versions] == [(0, 0, 6)]


async def test_the_same_ticket_gives_the_same_bits(house: House) -> None:
    await _prepare(house, _spec())
    await house.open_step(queries=1, group_size=2)
    one, other = training(1, 2)
    other.seed = one.seed
    await house.run([one, other])
    first, second = await house.samples("big")
    for name, array in _arrays(house, first).items():
        np.testing.assert_array_equal(array, _arrays(house, second)[name])


async def test_large_arrays_travel_by_reference(house: House) -> None:
    await _prepare(house, _spec("Large"), Spaces(8192, 4, 2, 2))
    await house.open_step(queries=1, group_size=1)
    await house.run(training(1, 1))
    [row] = await house.samples("big")
    assert row.columns["observations"].ref.startswith(f"{house.job_id}/columns/")
    assert row.ByteSize() < INLINE_BYTES
    assert _arrays(house, row)["observations"].shape == (3, 3, 1, 8192)


async def test_evaluation_stores_nothing_and_takes_the_best_actions(house: House) -> None:
    await _prepare(house, _spec(evaluation={"queries": 2, "temperature": 0}))
    await house.open_step(queries=1, group_size=1)
    ended = await house.run(evaluation(4))
    returns = {tuple(sorted(e.rewards.items())) for e in ended.values()}
    assert len(returns) == 1  # nothing is drawn
    assert not await house.samples("big")


async def test_new_weights_are_verified_and_then_played_with(house: House) -> None:
    await _prepare(house, _spec())
    await house.open_step(queries=1, group_size=1)
    always = _weights(0)
    head = next(name for name in always if name.endswith("head.bias"))
    always[head] = torch.tensor([-50.0, 50.0])
    await house.update(_publish(house, "big", 1, always))
    await house.run(training(1, 1))
    [row] = await house.samples("big")
    assert row.versions[0].version == 1
    assert (_arrays(house, row)["actions"] == 1).all()
    wrong = {name: t[..., :1].clone() if t.ndim else t for name, t in _weights(0).items()}
    with pytest.raises(FailedPrecondition, match="the model wants"):
        await house.update(_publish(house, "big", 2, wrong))
    [event] = (await house.run(evaluation(1))).values()
    assert event.start_versions["big"] == 1


async def test_a_cast_is_played_and_only_the_learners_fragment_is_kept(house: House) -> None:
    """One policy was made for both agents; a member of its past takes one of them."""
    spec = _spec(
        agents={"agent_0": {"policy": "big"}, "agent_1": {"policy": "big"}},
        policies={"big": {"network": NETWORK}},
        population={"slots": 2, "matches": {"least": 2}},
    )
    chooses = []
    for seed, policy in enumerate(("big", "all--0", "all--1")):
        made = _weights(seed, agents=2)
        head = next(name for name in made if name.endswith("head.bias"))
        made[head] = torch.tensor([50.0, -50.0] if policy == "all--0" else [-50.0, 50.0])
        chooses.append(_publish(house, policy, 0, made))
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id(), job_id=house.job_id, spec_json=spec.model_dump_json(), weights=chooses
    )
    await house.rollout.PrepareJob(request, timeout=PATIENCE)
    await house.open_step(queries=2, group_size=1)
    tickets = training(2, 1)
    seatings = (("agent_0", "agent_1"), ("agent_1", "agent_0"))
    for ticket, (own, other) in zip(tickets, seatings, strict=True):
        ticket.cast.update({own: "big", other: "all--0"})
        ticket.learners.append("big")
    ended = await house.run(tickets)
    assert {event.state for event in ended.values()} == {COMPLETED}, ended
    rows = {row.query_id: row for row in await house.samples("big")}
    for ticket, seat in zip(tickets, (0, 1), strict=True):
        row = rows[ticket.query_id]
        assert row.agent == f"agent_{seat}"
        arrays = _arrays(house, row)
        assert arrays["seats"].tolist() == [seat]
        assert (arrays["actions"] == 1).all()
        assert arrays["observations"][1].argmax(axis=-1).tolist() == [[1 - seat]] * 3
        assert dict(ended[ticket.trajectory_id].start_versions) == {"big": 0, "all--0": 0}
    # Members against each other: both get the agreed value, and nothing is stored.
    matches = evaluation(2)
    for match, cast in zip(matches, (("all--1", "all--1"), ("all--0", "all--1")), strict=True):
        match.purpose = rollout_pb.Ticket.PURPOSE_MATCH
        match.cast.update(dict(zip(("agent_0", "agent_1"), cast, strict=True)))
    ended = await house.run(matches)
    paid = [dict(ended[match.trajectory_id].rewards) for match in matches]
    assert paid == [{"agent_0": 4, "agent_1": 4}, {"agent_0": 0, "agent_1": 0}]
    assert len(await house.samples("big")) == 2


@pytest.mark.parametrize(
    ("cast", "kind", "says"),
    [
        ({"agent_1": "big"}, "cast_does_not_fit", r"network for agent_0, with inputs \[1, 4\]"),
        ({"agent_7": "big"}, "", "is not an agent"),
        ({"agent_1": "huge"}, "", "is not a policy"),
    ],
)
async def test_a_cast_that_a_network_was_not_made_for_is_refused(
    house: House, cast: dict[str, str], kind: str, says: str
) -> None:
    await _prepare(house, _spec())
    [ticket] = evaluation(1)
    ticket.cast.update(cast)
    with pytest.raises(InvalidArgument, match=says) as caught:
        await house.run([ticket])
    assert caught.value.field == "tickets[0].cast"
    assert not kind or caught.value.kind == kind
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Raises", "environment_raised: RuntimeError: the world has ended"),
        ("Poisons", "reward_not_finite: tests.support.arenas:Poisons: its rewards after step 1 "),
        (
            "Blinds",
            "environment_raised: tests.support.arenas:Blinds: its observations after step 1 are "
            "not finite: nan in copy 1",
        ),
    ],
)
async def test_a_broken_environment_fails_its_trajectory(
    house: House, source: str, reason: str
) -> None:
    await _prepare(house, _spec(source))
    await house.open_step(queries=1, group_size=1)
    [event] = (await house.run(training(1, 1))).values()
    assert event.state == FAILED
    assert event.reason.startswith(reason), event.reason
    assert not await house.samples("big")


async def test_an_environment_that_cannot_be_made_again_fails_its_trajectory(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas.Once, "made", 0)
    await _prepare(house, _spec("Once"))
    await house.open_step(queries=2, group_size=1)
    [first], [second] = [(await house.run([one])).values() for one in training(2, 1)]
    assert first.reason.startswith("environment_raised: RuntimeError"), first.reason
    assert second.state == FAILED
    assert second.reason.startswith("environment_raised: could not be made"), second.reason


async def test_an_environment_that_does_not_stop_is_not_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "STUCK_SECONDS", 0.0)
    limits = {"turn_seconds": 5, "trajectory_seconds": 0.3}
    await _prepare(house, _spec("Waits", limits=limits))
    await house.open_step(queries=2, group_size=1)
    [first], [second] = [(await house.run([one])).values() for one in training(2, 1)]
    assert first.reason.startswith("deadline: its episodes did not end"), first.reason
    assert second.reason.startswith("environment_deadline: 1 of them"), second.reason


async def test_an_aborted_trajectory_leaves_its_environment_between_two_steps(
    house: House,
) -> None:
    await _prepare(house, _spec("Waits"))
    await house.open_step(queries=1, group_size=1)
    [ticket] = training(1, 1)
    running = asyncio.create_task(house.run([ticket]))
    await until(lambda: len(house.service._runner) == 1)
    await abort(house, ticket.trajectory_id)
    arenas.RELEASED.set()
    [event] = (await running).values()
    assert event.state == ABORTED
    # And the next one is played.
    [event] = (await house.run(evaluation(1))).values()
    assert event.state == COMPLETED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {"source": "nowhere"}}, "environment.source"),
        ({"environment": {"source": "tests.support.arenas:Nothing"}}, "environment"),
        ({"environment": {"source": "tests.support.arenas:Unmade"}}, "environment.source"),
        (
            {"environment": {"source": "tests.support.arenas:Agree", "args": {"size": 3}}},
            "environment.args",
        ),
        ({"agents": {"agent_0": {"policy": "big"}, "bob": {"policy": "small"}}}, "agents"),
    ],
)
async def test_environments_that_cannot_be_played_are_refused_by_field(
    house: House, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await _prepare(house, _spec(**changes))
    assert caught.value.field == field
    assert caught.value.remedy


async def test_a_job_that_cannot_be_prepared_leaves_no_environment_behind(house: House) -> None:
    spec = _spec("Counted")
    await _prepare(house, spec)
    await house.rollout.ReleaseJob(
        rollout_pb.ReleaseJobRequest(request_id=new_id(), job_id=house.job_id), timeout=PATIENCE
    )
    assert arenas.Counted.there == 0
    other = Spaces(observation=3, state=3, actions=2, steps=2)
    with pytest.raises(TroupeError):
        await _prepare(house, spec, other)  # weights of another network
    assert arenas.Counted.there == 0


async def test_a_network_answers_no_prompt(house: House) -> None:
    await _prepare(house, _spec())
    request = rollout_pb.GenerateRequest(job_id=house.job_id, policy="big", input_ids=[1])
    with pytest.raises(InvalidArgument) as caught:
        await house.rollout.Generate(request)
    assert caught.value.kind == "no_language"


def _kuhn() -> JobSpec:
    args = {"game": "kuhn_poker", "seats": None}
    return _spec(
        environment={"source": "openspiel", "args": args, "copies": 512},
        agents={"player_0": {"policy": "big"}, "player_1": {"policy": "small"}},
    )


async def test_behave_returns_the_probabilities_of_every_information_state(house: House) -> None:
    """And their play follows these probabilities."""
    spec = _kuhn()
    spaces = environment_of(spec).spaces
    await _prepare(house, spec, spaces)
    game = await house.rollout.DescribeGame(
        rollout_pb.DescribeGameRequest(job_id=house.job_id, game="kuhn_poker")
    )
    assert [list(one.agents) for one in game.seatings] == [["player_0", "player_1"]]
    tree = histories_of("kuhn_poker")
    plans, told = [], {}
    for player, policy in enumerate(("big", "small")):
        answer = await house.rollout.Behave(
            rollout_pb.BehaveRequest(
                job_id=house.job_id, policy=policy, game="kuhn_poker", version=0
            )
        )
        assert len(answer.behaviours) == len(game.questions) == 12
        assert (answer.version, len(answer.checksum) > 0) == (0, True)
        for question, one in zip(game.questions, answer.behaviours, strict=True):
            assert sum(one.probabilities) == pytest.approx(1)
            if question.player != player:
                assert set(one.probabilities) == {0.5}
                continue
            actions = [move.action for move in question.moves]
            told[question.state] = dict(zip(actions, one.probabilities, strict=True))
        plans.append(tree.form.plan_of(player, told))
    expected = tree.form.values(plans)
    tickets = evaluation(24)
    for ticket in tickets:
        ticket.purpose = rollout_pb.Ticket.PURPOSE_MATCH
    ended = (await house.run(tickets)).values()
    paid = np.mean([[e.rewards["player_0"], e.rewards["player_1"]] for e in ended], axis=0)
    # 12,288 games of a standard deviation of about 1.2.
    np.testing.assert_allclose(paid, expected, atol=0.06)


async def test_a_game_that_is_not_played_cannot_be_told(house: House) -> None:
    spec = _kuhn()
    await _prepare(house, spec, environment_of(spec).spaces)
    for game, says in (("leduc_poker", "plays another game"), ("no_such_game", "no_such_game")):
        for call in (
            house.rollout.DescribeGame(
                rollout_pb.DescribeGameRequest(job_id=house.job_id, game=game)
            ),
            house.rollout.Behave(
                rollout_pb.BehaveRequest(job_id=house.job_id, policy="big", game=game)
            ),
        ):
            with pytest.raises(FailedPrecondition, match=says) as caught:
                await call
            assert caught.value.kind == "game_not_enumerable"
    request = rollout_pb.BehaveRequest(
        job_id=house.job_id, policy="big", game="kuhn_poker", version=7
    )
    with pytest.raises(FailedPrecondition) as caught:
        await house.rollout.Behave(request)
    assert caught.value.kind == "version_not_served"


async def test_only_a_game_of_openspiel_can_be_told(house: House) -> None:
    await _prepare(house, _spec())
    with pytest.raises(FailedPrecondition, match="is not `openspiel`") as caught:
        await house.rollout.DescribeGame(
            rollout_pb.DescribeGameRequest(job_id=house.job_id, game="kuhn_poker")
        )
    assert caught.value.kind == "game_not_enumerable"

"""PSRO of a tiny language model on Kuhn poker: real engines and steps, a killed orchestrator."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from examples.games.kuhn import workflow
from examples.games.model import make_model
from tests.e2e.conftest import House
from tests.e2e.populated import another
from tests.support.waiting import PATIENCE, until
from troupe.populations.enumerated import Enumeration, probabilities, score_request
from troupe.populations.tree import agent_values, mixed
from troupe.rpc import connect
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = Path(__file__).parents[2] / "examples" / "games" / "job.yaml"


def job(model: Path, **population: Any) -> str:
    """The example's job as a small PSRO. Of what a model says that knows nothing few moves are
    legal: a step has enough of them that it learns something."""
    spec = yaml.safe_load(JOB.read_text())
    spec["policies"]["player"]["model"]["path"] = str(model)
    spec["pipeline"] |= {"steps": 4, "queries_per_step": 8, "group_size": 16, "deterministic": True}
    spec["evaluation"] = {}
    spec["logging"] = {"tensorboard": False}
    spec["population"] = {
        "algorithm": "psro",
        "iteration_steps": 2,
        "matches": {"least": 12},
        **population,
    }
    return yaml.safe_dump(spec)


async def population(api: Any, job_id: str) -> orchestrator_pb.Population:
    found: orchestrator_pb.Population = (
        await api.GetPopulation(
            orchestrator_pb.GetPopulationRequest(job_id=job_id), timeout=PATIENCE
        )
    ).population
    return found


async def enough(api: Any, job_id: str, played: int) -> bool:
    return (await population(api, job_id)).matches_played >= played


async def test_a_population_survives_the_orchestrator(house: House, tmp_path: Path) -> None:
    text = job(make_model(tmp_path / "model"))
    quiet = await house.client.submit(text)
    record = await quiet.wait(timeout=400)
    assert record.state == "succeeded", record
    async with connect(house.cluster.state.orchestrator_address) as channel:
        api = OrchestratorStub(channel)
        expected = await population(api, quiet.id)
        (pool,) = expected.pools
        assert [one.member_id for one in pool.members] == ["player@0", "player@2", "player@4"]
        assert {cell.matches for cell in expected.cells} == {12}
        assert len(expected.history) == 3
        # Zero-sum: one side's gain is the other's loss.
        assert all(abs(sum(cell.mean)) < 1e-9 for cell in expected.cells)
        path = house.data_dir / quiet.id / "members" / "player" / "v2"
        assert AutoModelForCausalLM.from_pretrained(path).config.hidden_size == 48

        troubled = await house.client.submit(text)
        # In the first round of matches, and in the next iteration's round.
        for played in (0, 12):
            await until(lambda least=played: enough(api, troubled.id, least))
            pid = house.pid("orchestrator")
            os.kill(pid, signal.SIGKILL)
            await until(lambda old=pid: another(house, old))
        record = await troubled.wait(timeout=400)
        assert record.state == "succeeded", record
        found = await population(api, troubled.id)
        assert list(found.cells) == list(expected.cells)
        assert list(found.history) == list(expected.history)
        assert [m.checksum for m in found.pools[0].members] == [
            one.checksum for one in pool.members
        ]
    audit = await troubled.audit()
    assert not audit.violations, audit


async def test_payoffs_are_computed_from_the_members_answers(house: House, tmp_path: Path) -> None:
    """They equal the payoffs that a program computes with the same members."""
    path = make_model(tmp_path / "model")
    handle = await house.client.submit(job(path, game="kuhn_poker"))
    record = await handle.wait(timeout=400)
    assert record.state == "succeeded", record
    tree = Enumeration.of(workflow.make(), workflow.rules)  # type: ignore[arg-type]
    async with connect(house.cluster.state.orchestrator_address) as channel:
        api = OrchestratorStub(channel)
        found = await population(api, handle.id)
        assert found.matches_played == 0
        assert all(cell.exact for cell in found.cells)
        assert len(found.cells) == 6
        assert all(one.nash_conv > 0 for one in found.history)
        names = [one.member_id for one in found.pools[0].members]
        known = {}
        for slot in found.slots:
            request = score_request(tree.questions, handle.id, slot.policy, ends=True)
            answer = await api.ScorePolicy(
                orchestrator_pb.ScorePolicyRequest(request=request), timeout=PATIENCE
            )
            said = probabilities(tree.questions, answer.result)
            known[names.index(slot.member_id)] = tree.plans(tree.behaviours(said))
    cells = {tuple(cell.members): list(cell.mean) for cell in found.cells}
    one, other = sorted(known)
    expected = agent_values(tree.form, [known[one], known[other]])
    assert cells[one, other] == pytest.approx(list(expected), abs=1e-6)
    compared = 0
    for solved in found.history:
        shares = {names.index(k): p for k, p in solved.mixtures[0].probabilities.items()}
        if shares.keys() <= known.keys():
            played = mixed([known[k] for k in shares], list(shares.values()))
            gap = tree.form.nash_conv(played)
            assert solved.nash_conv == pytest.approx(gap, abs=1e-6)
            compared += 1
    assert compared

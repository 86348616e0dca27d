"""The Score call: log-probs of given continuations under the served weights."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout import scoring
from services.rollout.engines.requests import ScoreRequest
from tests.rollout.hand_engines import HandEngine
from tests.rollout.house import CONFIG, House, open_house, training, weights
from tests.rollout.processes import ServiceProcess
from tests.support.waiting import PATIENCE
from tests.workflow.stage import make_tokenizer
from troupe import tensors
from troupe.rpc import DeadlineExceeded, FailedPrecondition, InvalidArgument, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

TEXT = rollout_pb.ScoreContinuation(text="12")
USER = [common_pb.ChatMessage(role="user", content="3+4")]


async def score(
    house: House, *prompts: rollout_pb.ScorePrompt, **given: Any
) -> rollout_pb.ScoreResponse:
    request = rollout_pb.ScoreRequest(job_id=house.job_id, policy="big", prompts=prompts, **given)
    answer: rollout_pb.ScoreResponse = await house.rollout.Score(request, timeout=PATIENCE)
    return answer


async def test_text_and_ids_are_scored_as_the_model_says(house: House) -> None:
    await house.prepare("one_turn", agents={"solver": {"system_prompt": "be brief"}})
    tokenizer = make_tokenizer()
    said = await score(
        house,
        rollout_pb.ScorePrompt(
            messages=USER,
            continuations=[TEXT, rollout_pb.ScoreContinuation(text="7", ends=True)],
        ),
        rollout_pb.ScorePrompt(
            input_ids=[5, 6],
            continuations=[rollout_pb.ScoreContinuation(ids=[n]) for n in range(128)],
        ),
    )
    assert said.version == 0
    assert len(said.checksum) > 8
    talk, raw = said.prompts
    assert tokenizer.decode(talk.input_ids).startswith("<|im_start|>system\nbe brief")
    assert list(talk.continuations[0].ids) == tokenizer.encode("12", add_special_tokens=False)
    assert talk.continuations[1].ids[-1] == tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).eval()
    model.load_state_dict(weights(0))
    for prompt in said.prompts:
        for one in prompt.continuations:
            ids = torch.tensor([[*prompt.input_ids, *one.ids]])
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0, len(prompt.input_ids) - 1 :], -1)
            expected = [float(table[n, token]) for n, token in enumerate(one.ids)]
            assert one.logprobs == pytest.approx(expected, abs=1e-5)
            assert one.logprob == pytest.approx(sum(expected), abs=1e-5)
    assert sum(math.exp(one.logprob) for one in raw.continuations) == pytest.approx(1.0)


async def test_the_temperature_is_the_agents_own_unless_another_is_asked_for(house: House) -> None:
    await house.prepare("one_turn", agents={"solver": {"sampling": {"temperature": 0.5}}})
    prompt = rollout_pb.ScorePrompt(messages=USER, continuations=[TEXT])

    async def logprob(**given: float) -> float:
        return (await score(house, prompt, **given)).prompts[0].continuations[0].logprob

    assert await logprob() == await logprob(temperature=0.5) != await logprob(temperature=1.0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidArgument, match="positive temperature"):
            await logprob(temperature=bad)


async def test_the_version_that_is_wanted_or_none(house: House) -> None:
    await house.prepare("one_turn")
    prompt = rollout_pb.ScorePrompt(messages=USER, continuations=[TEXT])
    assert (await score(house, prompt, version=0)).version == 0
    with pytest.raises(FailedPrecondition, match="'big' is at version 0") as info:
        await score(house, prompt, version=3)
    assert info.value.kind == "version_not_served"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (rollout_pb.ScorePrompt(continuations=[TEXT]), "exactly one of messages and input_ids"),
        (rollout_pb.ScorePrompt(messages=USER), "it has no continuations"),
        (
            rollout_pb.ScorePrompt(
                messages=USER, continuations=[TEXT, rollout_pb.ScoreContinuation()]
            ),
            r"prompts\.1\.continuations\.1.*no tokens",
        ),
        (
            rollout_pb.ScorePrompt(
                messages=USER, continuations=[rollout_pb.ScoreContinuation(text="1", ids=[1])]
            ),
            "text or ids, not both",
        ),
        (
            rollout_pb.ScorePrompt(input_ids=[128], continuations=[TEXT]),
            "vocabulary of policy 'big' has 128",
        ),
        (rollout_pb.ScorePrompt(input_ids=[1] * 384, continuations=[TEXT]), "386 tokens"),
    ],
)
async def test_bad_requests_name_what_is_wrong(
    house: House, prompt: rollout_pb.ScorePrompt, says: str
) -> None:
    await house.prepare("one_turn")
    fine = rollout_pb.ScorePrompt(messages=USER, continuations=[TEXT])
    with pytest.raises(InvalidArgument) as info:
        await score(house, fine, prompt)
    error: TroupeError = info.value
    assert re.search(says, f"{error.field}: {error}"), error


async def test_one_call_has_its_bounds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.prepare("one_turn")
    with pytest.raises(InvalidArgument, match="nothing is asked for"):
        await score(house)
    monkeypatch.setattr(scoring, "MAX_TOKENS", 3)
    with pytest.raises(InvalidArgument, match="scores at most 3"):
        await score(house, rollout_pb.ScorePrompt(input_ids=[1, 2], continuations=[TEXT]))


TAUGHT: dict[str, Any] = {
    "agents": {"solver": {"sampling": {"temperature": 0.7}}},
    "policies": {"small": {"trainable": False}},
    "algorithm": {"distillation": {"teachers": {"solver": "small"}, "divergence": "sampled"}},
}


async def test_samples_bring_what_their_teacher_says_of_them(
    tmp_path: Path, store_process: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_house(tmp_path, store=store_process.address) as house:
        publish = house.publish
        monkeypatch.setattr(
            house,
            "publish",
            lambda policy, version: publish(policy, version, 5 if policy == "small" else 0),
        )
        await house.prepare("team", **TAUGHT)
        await house.open_step(queries=1, group_size=2)
        ended = await house.run(training(1, 2))
        assert {e.state for e in ended.values()} == {common_pb.TRAJECTORY_STATE_COMPLETED}, ended
        rows = await house.samples("big")
    assert {row.agent for row in rows} == {"solver"}
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).eval()
    teacher.load_state_dict(weights(5))
    for row in rows:
        prompt, response, behaviour, found = (
            torch.from_numpy(tensors.from_proto(one).copy())
            for one in (
                row.prompt_ids,
                row.response_ids,
                row.logprobs,
                row.columns["teacher_logprobs"].tensor,
            )
        )
        ids = torch.cat([prompt, response]).long()
        with torch.no_grad():
            table = torch.log_softmax(teacher(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        expected = table.gather(1, response.long()[:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert not torch.allclose(found, behaviour, atol=1e-2)


async def test_a_teacher_whose_engine_cannot_score_ends_the_job_with_its_name(
    tmp_path: Path, store_process: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: Any) -> Any:
        raise FailedPrecondition("engines of this kind cannot", remedy="Use another kind.")

    monkeypatch.setattr(scoring, "_score", refuses)
    async with open_house(tmp_path, store=store_process.address) as house:
        await house.prepare("team", **TAUGHT)
        await house.open_step(queries=1, group_size=1)
        (event,) = (await house.run(training(1, 1))).values()
    assert event.problem.field == "algorithm.distillation.teachers"
    assert "'small' cannot score" in event.problem.message


async def test_a_teacher_that_is_late_fails_the_one_trajectory(
    tmp_path: Path, store_process: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the call of all that run on this worker."""
    asked = 0
    score = scoring._score

    async def late(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise DeadlineExceeded("scored nothing", kind="score_deadline")
        return await score(*given)

    monkeypatch.setattr(scoring, "_score", late)
    async with open_house(tmp_path, store=store_process.address) as house:
        await house.prepare("team", **TAUGHT)
        await house.open_step(queries=1, group_size=2)
        ended = await house.run(training(1, 2))
    states = sorted(event.state for event in ended.values())
    assert states == [common_pb.TRAJECTORY_STATE_COMPLETED, common_pb.TRAJECTORY_STATE_FAILED]
    (reason,) = (event.reason for event in ended.values() if event.reason)
    assert reason.startswith("teacher_deadline: teacher 'small'")


class Scorer(HandEngine):
    """Scores when told to."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id)
        self.go_on = asyncio.Event()
        self.scored = 0
        self._life.started()
        self._life.updating(0)
        self._life.verified(0, "sum")

    async def _score(self, asked: Any, temperature: float) -> Any:
        self.scored += 1
        await self.go_on.wait()
        return [[-1.0] * len(one.ids) for one in asked], 0


async def test_the_engines_of_a_teacher_share_what_is_scored() -> None:
    engines = [Scorer(name) for name in "abc"]
    policy: Any = SimpleNamespace(
        name="p", weights=SimpleNamespace(version=0), serving_engines=engines
    )
    asked = [
        asyncio.create_task(scoring._score(policy, [ScoreRequest((1,) * 9, (2,))], 1.0, None, 30.0))
        for _ in range(9)
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    assert [engine.scored for engine in engines] == [3, 3, 3]
    for engine in engines:
        engine.go_on.set()
    await asyncio.gather(*asked)
    assert [engine.load().outstanding_tokens for engine in engines] == [0, 0, 0]

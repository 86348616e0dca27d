"""Preparing a job: what is wrong with it is found before anything runs, and named."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.rollout import job_setup, jobs
from services.rollout.engines.weights import skeleton
from services.rollout.garbage import exempt_new, settle
from tests.rollout.house import CONFIG, PLAYS, House, make_spec, tokenizer_path
from tests.workflow.stage import make_tokenizer
from troupe.job import JobSpec
from troupe.rpc import DataLoss, FailedPrecondition, InvalidArgument, NotFound, TroupeError, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb


async def refused(house: House, workflow: str = "team", **changes: Any) -> TroupeError:
    """The error of preparing such a job, of which nothing is left."""
    with pytest.raises(TroupeError) as caught:
        await house.prepare(workflow, **changes)
    assert caught.value.remedy
    engines = await house.rollout.ListEngines(rollout_pb.ListEnginesRequest())
    assert list(engines.engines) == []
    return caught.value


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"workflow": "no_such_module:f"}, "workflow", "does not exist"),
        ({"workflow": f"{PLAYS}:add"}, "workflow", "must be an async function"),
        ({"workflow": f"{PLAYS}:make_taskz"}, "workflow", "no attribute 'make_taskz'"),
        ({"tasks": {"source": f"{PLAYS}:Nowhere"}}, "tasks.source", "no attribute 'Nowhere'"),
        ({"tasks": {"args": {"size": 0}}}, "tasks.source", "has 0 queries"),
        ({"tasks": {"args": {"sice": 1}}}, "tasks.source", "unexpected keyword"),
        (
            {"agents": {"solver": {"sampling": {"stop": ["ab"]}}}},
            "agents.solver.sampling.stop",
            "2 tokens",
        ),
        (
            {"policies": {"big": {"model": {"tokenizer": "/no/such/tokenizer"}}}},
            "policies.big.model.tokenizer",
            "no such directory",
        ),
        (
            {"policies": {"big": {"model": {"config": None, "path": "./no/such/model"}}}},
            "policies.big.model.path",
            "no such directory",
        ),
        (
            {"policies": {"big": {"model": {"config": {"model_type": "qwen9"}}}}},
            "policies.big.model.config",
            "qwen9",
        ),
        (
            {"policies": {"small": {"model": {"config": {"vocab_size": 50}}}}},
            "policies.small.model.tokenizer",
            "but the model's vocabulary has 50",
        ),
    ],
)
async def test_a_fault_of_the_job_names_its_field(
    house: House, changes: dict[str, Any], field: str, words: str
) -> None:
    error = await refused(house, **changes) if "workflow" not in changes else None
    if error is None:
        spec = make_spec() | changes
        with pytest.raises(TroupeError) as caught:
            await house.prepare_raw(spec)
        error = caught.value
    assert isinstance(error, InvalidArgument | FailedPrecondition)
    assert error.field == field
    assert words in str(error)


async def test_a_tokenizer_of_another_model_is_told_by_its_ids(house: House) -> None:
    error = await refused(house, policies={"big": {"model": {"config": {"vocab_size": 64}}}})
    assert error.kind == "tokenizer_mismatch"


async def test_a_stop_string_may_be_a_single_token(house: House) -> None:
    await house.prepare("one_turn", agents={"solver": {"sampling": {"stop": ["a", "b"]}}})
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_COMPLETED
    assert not set("ab") & set(event.turns[0].response)


async def test_a_tokenizer_without_chat_template_is_a_problem_when_chat_is_used(
    house: House, tmp_path: Path
) -> None:
    bare: PreTrainedTokenizerFast = make_tokenizer(template=None)
    bare.save_pretrained(tmp_path / "bare")
    await house.prepare(
        "one_turn", policies={"big": {"model": {"tokenizer": str(tmp_path / "bare")}}}
    )
    event = await house.run_one()
    assert event.problem.kind == "chat_template"
    assert event.problem.field == "policies.big.model"
    assert event.problem.message == "agent 'solver': the tokenizer has no chat template"


async def test_a_hostile_chat_template_is_refused_and_the_worker_serves_the_next_job(
    house: House, tmp_path: Path
) -> None:
    hostile: PreTrainedTokenizerFast = make_tokenizer(template="{{ 'x'|center(3000000000) }}")
    hostile.save_pretrained(tmp_path / "hostile")
    error = await refused(
        house, policies={"big": {"model": {"tokenizer": str(tmp_path / "hostile")}}}
    )
    assert (error.kind, error.field) == ("chat_template", "policies.big.model.tokenizer")
    assert error.value == str(tmp_path / "hostile" / "chat_template.jinja")
    await house.prepare("one_turn")
    assert (await house.run_one()).state == common_pb.TRAJECTORY_STATE_COMPLETED


async def test_a_template_that_turns_hostile_later_fails_its_trajectory_only(
    house: House, tmp_path: Path
) -> None:
    later = "{% if messages|length == 1 and 'says' not in messages[0].content %}{{ 10**9 * 'x' }}"
    hostile: PreTrainedTokenizerFast = make_tokenizer(template=later + "{% endif %}")
    hostile.save_pretrained(tmp_path / "later")
    model = {"big": {"model": {"tokenizer": str(tmp_path / "later")}}}
    await house.prepare("one_turn", policies=model)
    event = await house.run_one()
    assert event.state == common_pb.TRAJECTORY_STATE_FAILED
    assert event.problem.kind == "chat_template"
    assert event.problem.value == str(tmp_path / "later" / "chat_template.jinja")


async def test_models_of_released_jobs_do_not_pile_up(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []

    def noted(*args: Any) -> Any:
        model = skeleton(*args)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("services.rollout.engines.embedded.host.skeleton", noted)
    monkeypatch.setattr(jobs, "settle", settle)  # as services do
    monkeypatch.setattr(job_setup, "exempt_new", exempt_new)
    for _ in range(4):
        await house.prepare("one_turn")
        await house.run_one()
        await house.rollout.ReleaseJob(
            rollout_pb.ReleaseJobRequest(request_id=new_id("release"), job_id=house.job_id)
        )
    await house.prepare("one_turn")
    alive = [model() is not None for model in models]
    assert alive[-1]
    # What a thread on its way out still held at its job's end goes when the next job ends.
    assert not any(alive[:3]), alive


async def test_an_invalid_specification_is_refused(house: House) -> None:
    spec = json.loads(JobSpec.model_validate(make_spec()).model_dump_json())
    spec["pipeline"]["stepz"] = 3
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id("p"), job_id="j", spec_json=json.dumps(spec), weights=[]
    )
    with pytest.raises(InvalidArgument) as caught:
        await house.rollout.PrepareJob(request)
    assert caught.value.field == "pipeline.stepz"


async def test_every_policy_needs_weights(house: House) -> None:
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id("p"),
        job_id="j",
        spec_json=JobSpec.model_validate(make_spec()).model_dump_json(),
        weights=[house.publish("big", 0)],
    )
    with pytest.raises(InvalidArgument, match="no weights are given for policy 'small'"):
        await house.rollout.PrepareJob(request)


async def test_weights_that_are_gone_are_asked_for_again(house: House) -> None:
    refs = [house.publish("big", 0), house.publish("small", 0)]
    house.transfer.delete(refs[1].key)
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id("p"),
        job_id=house.job_id,
        spec_json=JobSpec.model_validate(make_spec()).model_dump_json(),
        weights=refs,
    )
    with pytest.raises(NotFound) as caught:
        await house.rollout.PrepareJob(request)
    assert (caught.value.kind, caught.value.field) == ("weights_not_found", "small")


async def test_weights_with_another_checksum_are_refused(house: House) -> None:
    refs = [house.publish("big", 0), house.publish("small", 0)]
    refs[0].checksum = "0" * 32
    request = rollout_pb.PrepareJobRequest(
        request_id=new_id("p"),
        job_id=house.job_id,
        spec_json=JobSpec.model_validate(make_spec()).model_dump_json(),
        weights=refs,
    )
    with pytest.raises((NotFound, DataLoss, FailedPrecondition)):
        await house.rollout.PrepareJob(request)


async def test_a_changed_specification_replaces_the_job(house: House) -> None:
    await house.prepare("one_turn")
    await house.prepare("raises")
    event = await house.run_one()
    assert event.reason.startswith("workflow_raised")


async def test_an_unknown_job_asks_for_preparation(house: House) -> None:
    ref = house.publish("big", 1)
    for call in (
        house.run_one,
        lambda: house.update(ref),
        lambda: house.rollout.Generate(
            rollout_pb.GenerateRequest(job_id=house.job_id, policy="big")
        ),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            await call()
        assert caught.value.kind == "job_not_prepared"


async def test_release_stops_the_engines_and_is_repeatable(house: House) -> None:
    await house.prepare("one_turn")
    for _ in range(2):
        await house.rollout.ReleaseJob(
            rollout_pb.ReleaseJobRequest(request_id=new_id("r"), job_id=house.job_id)
        )
    assert not (await house.rollout.ListEngines(rollout_pb.ListEnginesRequest())).engines
    await house.prepare("one_turn")
    assert (await house.run_one()).state == common_pb.TRAJECTORY_STATE_COMPLETED


async def test_generate_answers_messages_and_ids(house: House) -> None:
    await house.prepare("one_turn", agents={"solver": {"system_prompt": "be brief"}})
    sampling = common_pb.SamplingParams(temperature=0.0, max_new_tokens=5)

    async def generate(**given: Any) -> rollout_pb.GenerateResponse:
        request = rollout_pb.GenerateRequest(
            request_id=new_id("g"), job_id=house.job_id, policy="big", sampling=sampling, **given
        )
        return await house.rollout.Generate(request)  # type: ignore[no-any-return]

    by_text = await generate(messages=[common_pb.ChatMessage(role="user", content="3+4")])
    assert 1 <= len(by_text.output_ids) <= 5
    assert len(by_text.logprobs) == len(by_text.output_ids)
    assert [v.version for v in by_text.versions] == [0]
    assert make_tokenizer().decode(by_text.input_ids).startswith("<|im_start|>system\nbe brief")
    by_ids = await generate(input_ids=by_text.input_ids)
    assert by_ids.output_ids == by_text.output_ids
    with pytest.raises(InvalidArgument, match="exactly one of messages and input_ids"):
        await generate()
    sampling.top_p = 7
    with pytest.raises(InvalidArgument, match="top_p"):
        await generate(input_ids=[5])


def test_the_tiny_model_fits_its_tokenizer() -> None:
    assert max(make_tokenizer().get_vocab().values()) < CONFIG["vocab_size"]  # type: ignore[operator]
    assert Path(tokenizer_path(), "tokenizer.json").is_file()

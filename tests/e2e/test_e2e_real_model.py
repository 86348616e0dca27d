"""A real pretrained model (SmolLM2-135M-Instruct): its tokenizer, tied weights, adapters, engines.

Slow tests: the model is downloaded (93 MB) and converted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_team import model as real_model
from tests.e2e.conftest import House
from tests.rollout.engines.real_server import START_SECONDS, interpreter
from troupe.checkpoints.merging import merge_in_place
from troupe.client import Trajectory
from troupe.rpc.errors import Unavailable

JOB = Path(real_model.__file__).with_name("job.yaml")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return real_model.make(tmp_path_factory.mktemp("real") / "smollm2")
    except Unavailable as error:
        pytest.skip(f"the model cannot be had here: {error}")


def short_job(smol: Path, workflow: str, writer: dict[str, Any] | None = None) -> str:
    """The example's job with two steps of a few trajectories.

    `writer`: further fields of the writer's engine.
    """
    spec = yaml.safe_load(JOB.read_text())
    for policy in spec["policies"].values():
        policy["model"]["path"] = str(smol)
    spec["pipeline"] |= {"steps": 2, "queries_per_step": 2, "group_size": 2}
    spec["pipeline"]["micro_batch_samples"] = 4
    spec["evaluation"] = {"queries": 2, "every": 2}
    spec["checkpoint"] = {"every": 2, "keep": 1}
    spec["logging"] = {"tensorboard": False}
    spec["workflow"] = workflow
    spec["policies"]["writer"]["engine"] = spec["policies"]["writer"]["engine"] | (writer or {})
    return yaml.safe_dump(spec)


def test_the_checkpoint_is_whole(smol: Path) -> None:
    """What transformers makes of the GGUF file is a plain checkpoint of tied embeddings, whose
    chat template begins and ends messages with tokens of their own."""
    tensors = load_file(smol / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {one.dtype for one in tensors.values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(smol)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(smol)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert tokenizer.eos_token_id == end
    # It is pretrained: a likely continuation is likely.
    text = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        best = model(**text).logits[0, -1].argmax()
    assert tokenizer.decode(best).strip() == "Paris"


def check_conversation(one: Trajectory) -> None:
    """Writer, editor and the writer again, whose first reply stands in its prompt."""
    assert [turn.agent for turn in one.conversation] == ["writer", "editor", "writer"]
    assert all("<|im_" not in turn.response for turn in one.conversation)
    assert one.conversation[0].response in [text for _, text in one.conversation[2].messages]


async def test_a_whole_model_and_an_adapter_are_trained_exported_and_evaluated(
    house: House, smol: Path, tmp_path: Path
) -> None:
    job = short_job(smol, workflow="tests.support.again:write_by_endpoint")
    handle = await house.client.submit(job)
    record = await handle.wait(timeout=900)
    assert record.state == "succeeded", record
    assert record.versions == {"writer": 2, "editor": 2}
    assert not (await handle.audit()).violations
    # The ids of earlier turns were reused as they were sampled.
    broken = [value for name, value in record.metrics.items() if "prefix_breaks" in name]
    assert broken, record.metrics
    assert not any(broken), record.metrics
    pairs = await handle.before_and_after()
    assert len(pairs) == 2
    for before, after in pairs:
        assert (before.query_id, before.step, after.step) == (after.query_id, 0, 2)
        check_conversation(before)
        check_conversation(after)
    reply = await handle.generate("writer", messages="Name a colour.", max_new_tokens=4)
    assert reply.version == 2

    saved = {one.policy: Path(one.path) for one in await handle.checkpoints()}
    first = load_file(smol / "model.safetensors")
    trained = load_file(saved["writer"] / "model.safetensors")
    assert trained.keys() == first.keys(), "tied weights are written once"
    assert any(not torch.equal(trained[name], first[name]) for name in first)
    AutoTokenizer.from_pretrained(saved["writer"])

    exported = await handle.export("editor", tmp_path / "editor")
    adapter = load_file(exported / "adapter_model.safetensors")
    assert any(bool(t.any()) for name, t in adapter.items() if ".lora_B." in name)
    merge_in_place(exported, smol)
    merged = AutoModelForCausalLM.from_pretrained(exported)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(smol)(ids).logits
        assert not torch.equal(merged(ids).logits, base)


async def test_a_real_server_takes_the_weights_of_a_real_model(
    house: House, smol: Path, tmp_path: Path
) -> None:
    """The writer in SGLang, the editor in the embedded engine: two steps with both."""
    engine = {
        "kind": "sglang",
        "python": interpreter(tmp_path),
        "start_timeout_seconds": START_SECONDS,
    }
    job = short_job(smol, "tests.support.again:write_again", engine)
    handle = await house.client.submit(job)
    record = await handle.wait(timeout=1000)
    assert record.state == "succeeded", record
    assert record.versions == {"writer": 2, "editor": 2}
    assert not (await handle.audit()).violations
    # Engine and trainer agree on the probabilities of the same ids, before and after an update.
    assert record.metrics["writer/k3_kl"] < 1e-4, record.metrics

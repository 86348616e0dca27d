"""The result of `troupe export` gives the trainer's and the engine's outputs, token by token."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.sglang.server import SglangServer
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.state.checkpoint import checkpoint_path
from tests.rollout.engines.real_server import running
from tests.support.training import log_prob_table, rounding, tiny_config
from tests.trainer.stage import TrainingStage
from troupe.checkpoints.verifying import verify
from troupe.client.cli.app import main
from troupe.job import JobSpec, ModelSpec, PolicySpec
from troupe.rpc import InvalidArgument
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

PROMPTS = ([5, 6], [17], [9, 3, 9, 3, 9])
TOKENS = 12
# They differ in names that share a tensor, the published type, the trained weights, and a
# value network.
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"model": {"tie_word_embeddings": False}},
    "half": {"dtype": "bfloat16"},
    "half_untied": {"dtype": "bfloat16", "model": {"tie_word_embeddings": False}},
    "critic": {"algorithm": {"advantage": "gae"}},
    "adapter": {"lora": {"rank": 4, "alpha": 64}},
    "merged": {"lora": {"rank": 4, "alpha": 64}},
    "half_adapter": {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 64}},
    "half_merged": {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 64}},
}


def spec_of(stage: TrainingStage, kind: str) -> JobSpec:
    how = dict(KINDS[kind])
    # As sure of its next token as a trained model; a random model is nearly uniform.
    config = tiny_config(initializer_range=0.5, **how.pop("model", {}))
    model = {
        "config": config,
        "tokenizer": str(stage.tokenizer),
        "dtype": how.pop("dtype", "float32"),
    }
    lora = how.pop("lora", None)
    values = stage.spec(model=model, optimizer={"lr": 0.05}, **how).model_dump(mode="json")
    values["policies"]["solver"]["lora"] = lora
    return JobSpec.model_validate(values)


async def trained(stage: TrainingStage, spec: JobSpec) -> tuple[common_pb.WeightsRef, Any]:
    """Return version 1 as published, and the trainer's own model."""
    trainer = await stage.trainer()
    await trainer.bind(spec)
    await stage.open()
    binding = trainer.worker.bindings.bound[(stage.job_id, "solver")]
    await stage.play(binding.learner.model)
    ref = (await trainer.run(0, 0)).weights
    await trainer.checkpoint(1)
    return ref, binding.learner.model


def export(stage: TrainingStage, kind: str, to: Path) -> Path:
    merged = {"adapter": ["--adapter"], "merged": ["--merged"]}.get(kind.split("_")[-1], [])
    runs = str(stage.root / "runs")
    assert main(["export", stage.job_id, str(to), "--data-dir", runs, *merged]) == 0
    return to


def load(folder: Path) -> Any:
    if not (folder / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    under = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return PeftModel.from_pretrained(under, folder).eval()


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the most likely tokens after `prompt`, by plain forward passes."""
    ids = list(prompt)
    for _ in range(TOKENS):
        inputs = torch.tensor([ids], device=model.device)
        ids.append(int(model(inputs, use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Judge:
    """An export in float64, which says how likely what rounded arithmetic drew really was."""

    def __init__(self, model: Any) -> None:
        self.rounded, self.exact = model, copy.deepcopy(model).double()

    def shortfall(self, prompt: list[int], tokens: list[int]) -> float:
        """How much less likely than the most likely one a token was at most, in nats."""
        logp = log_prob_table(self.exact, prompt, tokens)
        return float((logp.max(1).values - logp[torch.arange(len(tokens)), tokens]).max())

    def allowed(self, prompt: list[int], tokens: list[int]) -> float:
        """The shortfall that rounding explains: who is wrong by e about every token takes one that
        is less likely by up to 2 e. Half as much again is for what rounds in another order than the
        model that e is measured on."""
        return 3.0 * rounding(self.rounded, self.exact, prompt, tokens)


async def engine_says(
    policy: PolicySpec, ref: common_pb.WeightsRef, transfer: Transfer
) -> list[list[int]]:
    engine = EmbeddedEngine("e0", "solver", policy)
    await engine.start()
    try:
        await engine.update_weights(ref, transfer)
        sampling = Sampling(max_new_tokens=TOKENS, temperature=0.0)
        found = [
            await engine.generate(f"r{number}", list(prompt), sampling, deadline_seconds=60)
            for number, prompt in enumerate(PROMPTS)
        ]
    finally:
        await engine.stop()
    return [list(one.token_ids) for one in found]


@pytest.mark.parametrize("kind", KINDS)
async def test_exports_compute_what_trainer_and_engine_compute(
    stage: TrainingStage, tmp_path: Path, kind: str
) -> None:
    spec = spec_of(stage, kind)
    ref, own = await trained(stage, spec)
    folder = await asyncio.to_thread(export, stage, kind, tmp_path / "exported")
    verify(folder)
    model = load(folder)
    # Only what is needed: a critic's values are no part of the policy.
    assert not any("critic" in name or "value_head" in name for name, _ in model.named_parameters())
    served = await engine_says(spec.policies["solver"], ref, stage.transfer)
    first = stage.first_model(spec)
    assert any(greedy(first, p) != greedy(own, p) for p in PROMPTS), "nothing was learned"
    if kind.startswith("half"):  # near ties fall either way
        judge = Judge(model)
        for prompt, tokens in zip(PROMPTS, served, strict=True):
            for said in (tokens, greedy(own, prompt)):
                assert judge.shortfall(prompt, said) <= judge.allowed(prompt, said)
        old = {tuple(prompt): greedy(first, prompt) for prompt in PROMPTS}
        assert any(
            judge.shortfall(list(p), t) > 2 * judge.allowed(list(p), t) for p, t in old.items()
        ), "weights that were not trained would have passed"
        return
    for prompt, tokens in zip(PROMPTS, served, strict=True):
        assert greedy(model, prompt) == tokens == greedy(own, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "half", "critic", "merged", "half_merged"])
async def test_sglang_computes_what_the_trainer_computes(
    stage: TrainingStage, tmp_path: Path, kind: str
) -> None:
    spec = spec_of(stage, kind)
    _, own = await trained(stage, spec)
    place = tmp_path / "served"
    place.mkdir()
    folder = await asyncio.to_thread(export, stage, kind, place / "model")
    model = load(folder)
    with running(place, load_format="auto") as server:
        client = SglangServer(server.url)
        for prompt in PROMPTS:
            sampling = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            meta = await client.request(f"r{prompt}", list(prompt), sampling)
            tokens = [row[1] for row in meta["output_token_logprobs"]]
            if kind.startswith("half"):
                judge = Judge(model)
                assert judge.shortfall(prompt, tokens) <= judge.allowed(prompt, tokens)
            else:
                assert tokens == greedy(model, prompt) == greedy(own, prompt)
        await client.close()


@pytest.mark.parametrize("kind", ["tied", "adapter"])
async def test_damaged_weights_are_neither_exported_nor_trained_on(
    stage: TrainingStage, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(stage, kind)
    await trained(stage, spec)
    name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    folder = checkpoint_path(stage.root / "runs", stage.job_id, "solver", 1)
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 0x10  # of a weight: the checkpoint loads as before
    (folder / name).write_bytes(data)
    runs, target = str(stage.root / "runs"), tmp_path / "exported"
    arguments = ["export", stage.job_id, str(target), "--data-dir", runs]
    assert await asyncio.to_thread(main, arguments) != 0
    told = capsys.readouterr().err
    assert f"{name} of checkpoint" in told
    assert "differs from the written file" in told
    assert not target.exists()
    policy = spec.policies["solver"]
    with pytest.raises(InvalidArgument, match="differs from the written file") as caught:
        begin_from(folder, policy)
    assert caught.value.kind == ("adapter_unusable" if policy.lora else "model_unreadable")


def begin_from(folder: Path, policy: PolicySpec) -> None:
    """Load the weights with which another job begins."""
    if policy.lora is None:
        model = ModelSpec(path=str(folder))
        load_model("solver", policy.model_copy(update={"model": model}), 0)
    else:
        lora = policy.lora.model_copy(update={"path": str(folder)})
        load_adapted("solver", policy.model_copy(update={"lora": lora}), 0, torch.device("cpu"))

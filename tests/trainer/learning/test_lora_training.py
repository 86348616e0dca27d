"""Adapters through a real trainer service: steps, restarts, checkpoints, exports."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.trainer.learning.lora import adapter_of
from services.trainer.learning.model import load_adapted
from tests.trainer.learning.test_lora import CPU, lora_spec
from tests.trainer.stage import Trainer, TrainingStage
from troupe.checkpoints.adapters import AdapterContent, base_key, merged
from troupe.checkpoints.merging import merge_in_place
from troupe.checkpoints.verifying import Lineage
from troupe.client.cli.app import main
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.transfer import checksum_of
from troupe.v1 import common_pb2 as common_pb

BOTH = ("a", "b")


async def train(
    stage: TrainingStage, trainer: Trainer, spec: JobSpec, step: int, policies: Any = BOTH
) -> dict[str, common_pb.WeightsRef]:
    model = load_adapted("a", spec.policies["a"], spec.seed, CPU)
    await stage.open(step, policies=policies, version=step)
    await stage.play(model, policies=policies, step=step, version=step)
    commits = await asyncio.gather(*(trainer.run(step, step, name) for name in policies))
    return {name: commit.weights for name, commit in zip(policies, commits, strict=True)}


async def test_two_policies_over_one_base_go_on_bitwise_after_a_restart(
    stage: TrainingStage, tokenizer: Path
) -> None:
    values = lora_spec(tokenizer, BOTH).model_dump(mode="json")
    values["pipeline"]["deterministic"] = True
    spec = JobSpec.model_validate(values)
    trainer = await stage.trainer()
    for name in BOTH:
        await trainer.bind(spec, name)
    bindings = [trainer.worker.bindings.bound[(stage.job_id, name)] for name in BOTH]
    bases = [binding.learner.base for binding in bindings]
    assert bases[0] is bases[1]
    first = await train(stage, trainer, spec, 0)
    content = {n: AdapterContent.of(stage.weights(ref)) for n, ref in first.items()}
    assert content["a"].base == content["b"].base == bases[0].checksum
    # The base is published once, whatever the number of policies and versions.
    base = base_key(stage.job_id, bases[0].checksum)
    keys = stage.transfer.keys()
    assert [key for key in keys if "/base." in key] == [base]
    assert all(bool(t.any()) for t in content["a"].tensors.values())
    assert any(
        not torch.equal(t, content["b"].tensors[name]) for name, t in content["a"].tensors.items()
    )
    second = await train(stage, trainer, spec, 1)

    # The same job again; another worker makes its second step, from the state on disk.
    job, before = await stage.sibling()
    for name in BOTH:
        await before.bind(spec, name)
    assert {n: r.checksum for n, r in (await train(job, before, spec, 0)).items()} == {
        name: ref.checksum for name, ref in first.items()
    }
    after = await job.trainer()
    for name in BOTH:
        await after.bind(spec, name, version=1, checksum=first[name].checksum)
    again = await train(job, after, spec, 1)
    assert {n: r.checksum for n, r in again.items()} == {n: r.checksum for n, r in second.items()}
    # The kept state is small: adapters and their moments.
    state = next(stage.root.glob(f"runs/{job.job_id}/state/a/v2-*"))
    size = sum(file.stat().st_size for file in state.glob("*.safetensors"))
    assert size < sum(t.nbytes for t in bases[0].weights().values())


async def test_a_base_that_changed_under_a_job_is_refused(
    stage: TrainingStage, tokenizer: Path, tmp_path: Path
) -> None:
    spec = lora_spec(tokenizer, ["a"])
    plain = adapter_of(load_adapted("a", spec.policies["a"], 0, CPU)).base.module  # type: ignore[union-attr]
    plain.save_pretrained(tmp_path / "base")
    values = spec.model_dump(mode="json")
    values["policies"]["a"]["model"] |= {"path": str(tmp_path / "base"), "config": None}
    spec = JobSpec.model_validate(values)
    trainer = await stage.trainer()
    ref = await trainer.bind(spec, "a")
    await trainer.release("a")
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        changed.model.norm.weight.add_(1)
    changed.save_pretrained(tmp_path / "base")
    with pytest.raises(FailedPrecondition, match="is committed") as caught:
        await trainer.bind(spec, "a", checksum=ref.checksum)
    assert caught.value.kind == "weights_changed"


async def test_a_frozen_policy_is_served_with_the_adapter_that_it_is_given(
    stage: TrainingStage, tokenizer: Path
) -> None:
    spec = lora_spec(tokenizer, ["a"])
    trainer = await stage.trainer()
    await trainer.bind(spec, "a")
    refs = await train(stage, trainer, spec, 0, ("a",))
    folder = await trainer.checkpoint(1, "a")
    values = lora_spec(tokenizer, ["a", "b"], path=str(folder)).model_dump(mode="json")
    values["policies"]["b"]["trainable"] = False
    frozen = JobSpec.model_validate(values)
    job, other = await stage.sibling()
    ref = await other.bind(frozen, "b")
    # Its version 0 equals the trained adapter bit for bit: the same content, the same name.
    assert ref.checksum == refs["a"].checksum
    assert not list((stage.root / "runs" / job.job_id).glob("state/b/*"))
    with pytest.raises(FailedPrecondition, match="is frozen"):
        await other.run(0, 0, "b")
    # A trained policy begins there, and its divergence is measured from there.
    assert (await other.bind(frozen, "a")).checksum == refs["a"].checksum


@pytest.mark.parametrize(
    ("lora", "prepare", "field", "message"),
    [
        ({"rank": 2, "alpha": 8}, "", "rank", "has rank 4"),
        ({"alpha": 9}, "", "alpha", "has alpha 8"),
        ({"target_modules": ["q_proj"]}, "", "path", "made for another model"),
        ({}, "nothing", "path", "no adapter_config.json"),
        ({}, "endless", "path", "no adapter_config.json that can be read"),
        ({}, "dora", "path", "not plain LoRA"),
        ({}, "base", "path", "trained on a base with checksum"),
        ({}, "damaged", "path", "cannot be read"),
    ],
)
async def test_adapters_that_do_not_fit_the_job_are_refused_by_field(
    tokenizer: Path, tmp_path: Path, lora: dict[str, Any], prepare: str, field: str, message: str
) -> None:
    from services.trainer.learning.model import load_tokenizer
    from services.trainer.state.checkpoint import lineage_of, save_checkpoint

    spec = lora_spec(tokenizer, ["a"])
    model = load_adapted("a", spec.policies["a"], 0, CPU)
    folder = tmp_path / "checkpoints" / "a" / "v1"
    save_checkpoint(
        folder,
        model,
        adapter_of(model).weights(),  # type: ignore[union-attr]
        load_tokenizer("a", spec.policies["a"]),
        keep=2,
        lineage=lineage_of(spec, "j", "a", 1, 0, "c", model),
    )
    config = folder / "adapter_config.json"
    if prepare == "nothing":
        folder = tmp_path
    elif prepare == "endless":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": math.inf}))
    elif prepare == "dora":
        config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    elif prepare == "base":
        told = json.loads((folder / "troupe.json").read_text())
        (folder / "troupe.json").write_text(json.dumps({**told, "base_checksum": "0" * 32}))
    elif prepare == "damaged":
        (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    wanted = lora_spec(tokenizer, ["a"], **{"rank": 4, "alpha": 8, **lora}, path=str(folder))
    with pytest.raises(InvalidArgument, match=message) as caught:
        load_adapted("a", wanted.policies["a"], 0, CPU)
    assert caught.value.kind == "adapter_unusable"
    assert caught.value.field == f"policies.a.lora.{field}"
    assert caught.value.remedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_exports_load_with_peft_and_with_transformers_alone(
    stage: TrainingStage,
    tokenizer: Path,
    tmp_path: Path,
    dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = lora_spec(tokenizer, ["a"]).model_dump(mode="json")
    values["policies"]["a"]["model"]["dtype"] = dtype
    spec = JobSpec.model_validate(values)
    trainer = await stage.trainer()
    await trainer.bind(spec, "a")
    ref = (await train(stage, trainer, spec, 0, ("a",)))["a"]
    await trainer.checkpoint(1, "a")
    runs = stage.root / "runs"
    (runs / stage.job_id / "metrics.jsonl").write_text(
        '{"step": 0, "reward/mean": 9}\n{"step": 1, "reward/mean": 0.5, "lr": 1}\n'
    )
    content = AdapterContent.of(stage.weights(ref))
    base = stage.transfer.get(base_key(stage.job_id, content.base))[0]
    plain = AutoModelForCausalLM.from_config(
        adapter_of(
            trainer.worker.bindings.bound[(stage.job_id, "a")].learner.model
        ).base.module.config,  # type: ignore[union-attr]
        dtype=getattr(torch, dtype),
    )
    ids = torch.arange(20)[None]

    def export(*arguments: str) -> tuple[int, str]:
        status = main(["export", stage.job_id, *arguments, "--data-dir", str(runs)])
        return status, capsys.readouterr().err

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.eval()(ids).logits.float()
        return found

    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    assert await asyncio.to_thread(export, str(adapter), "--adapter") == (0, "")
    assert await asyncio.to_thread(export, str(whole), "--policy", "a", "--merged") == (0, "")
    plain.load_state_dict(merged(base, content), strict=False)
    loaded = AutoModelForCausalLM.from_pretrained(whole)
    assert loaded.dtype == getattr(torch, dtype)
    assert torch.equal(logits(loaded), logits(plain))
    assert not (whole / "adapter_config.json").exists()
    config = json.loads((adapter / "adapter_config.json").read_text())
    under = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    assert checksum_of(dict(under.named_parameters())) == content.base
    peft = PeftModel.from_pretrained(under, adapter)
    assert torch.allclose(logits(peft), logits(plain), atol=1e-5 if dtype == "float32" else 0.05)
    assert len(AutoTokenizer.from_pretrained(adapter)) == 64
    card = (whole / "README.md").read_text()
    for told in (stage.job_id, "1, made by step 1", "| `reward/mean` | 0.5 |", ref.checksum):
        assert told in card
    assert "lr" not in card.split("|---|---|")[1]

    for arguments, told in (
        (("--version", "7"), "there is no checkpoint of a@7; there are: a@1"),
        (("--policy", "z"), "there is no checkpoint of z; there are: a@1"),
    ):
        status, err = await asyncio.to_thread(export, str(tmp_path / "none"), *arguments)
        assert status != 0
        assert told in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "none").exists()
    lineage = Lineage.read(adapter)
    assert lineage is not None
    (adapter / "troupe.json").write_text(
        json.dumps({**json.loads((adapter / "troupe.json").read_text()), "base_checksum": "1"})
    )
    with pytest.raises(Exception, match="was trained on 1") as caught:
        merge_in_place(adapter)
    assert caught.value.kind == "base_mismatch"  # type: ignore[attr-defined]
    assert (adapter / "adapter_model.safetensors").exists()

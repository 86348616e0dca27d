"""Adapters over a shared base: trained weights, shared weights, published weights."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.frozen_base import FrozenBase, leave_unused_bases
from services.trainer.learning.learner import Learner
from services.trainer.learning.lora import Adapter, adapter_of
from services.trainer.learning.model import load_adapted, load_model
from services.trainer.state import parameter_memory
from tests.support.training import make_spec
from tests.trainer.batches import Shape, full_batch_gradient, random_rows, relative_error
from tests.trainer.learning.test_learner import make_rows
from troupe.checkpoints.adapters import AdapterContent, NotAnAdapter, is_adapter, merged
from troupe.job import JobSpec
from troupe.rpc import InvalidArgument

CPU = torch.device("cpu")


def lora_spec(tokenizer: Path, policies: Any = ("a", "b"), **lora: Any) -> JobSpec:
    values = make_spec(tokenizer, policies=policies).model_dump(mode="json")
    for policy in values["policies"].values():
        policy["lora"] = {"rank": 4, "alpha": 8, **lora}
    return JobSpec.model_validate(values)


def learner_of(spec: JobSpec, policy: str) -> Learner:
    model = load_adapted(policy, spec.policies[policy], spec.seed, CPU)
    return Learner(model, spec, policy)


def adapter(model: Any) -> Adapter:
    found = adapter_of(model)
    assert found is not None
    return found


def storages(module: torch.nn.Module) -> dict[int, int]:
    """Return the bytes of the storages of a module's parameters, by address."""
    kept = (p.untyped_storage() for p in module.parameters())
    return {s.data_ptr(): s.nbytes() for s in kept}


def test_training_changes_only_the_adapter(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer, ["a"])
    learner = learner_of(spec, "a")
    model = learner.model
    base = {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}
    for step in range(2):
        learner.accumulate(make_rows(model, 8, step, noise=0.3))
        held = [n for n, p in model.named_parameters() if p.grad is not None]
        assert held
        assert all(".lora_" in name for name in held)
        assert learner.apply(step).applied
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    adapted = sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)
    assert sum(t.numel() for t in learner.weights().values()) == adapted
    moments = learner.moments()
    assert all(".lora_" in name for name in moments)
    assert sum(t.numel() for n, t in moments.items() if not n.startswith("step/")) == 2 * adapted
    assert all(bool(t.any()) for t in learner.weights().values())


def test_a_base_is_held_once_however_many_policies_use_it(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer, [f"p{n}" for n in range(4)])
    models = [load_adapted(name, spec.policies[name], spec.seed, CPU) for name in spec.policies]
    assert len({id(adapter(model).base) for model in models}) == 1
    alone = sum(storages(models[0]).values())
    together = sum({**storages(models[0]), **storages(models[1]), **storages(models[2])}.values())
    own = sum(p.nbytes for n, p in models[0].named_parameters() if ".lora_" in n)
    assert together == alone + 2 * own
    # The reference is the base itself.
    reference = adapter(models[3]).frozen(adapter(models[3]).weights())
    assert set(storages(reference)) <= set(storages(models[0]))
    # It contains no other adapter.
    assert not any(".lora_" in name for name, _ in reference.named_parameters())


def test_a_base_that_nobody_uses_leaves_memory(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer, ["a"], rank=2)
    other = spec.model_copy(update={"seed": 77})
    model = load_adapted("a", other.policies["a"], 77, CPU)
    base = weakref.ref(adapter(model).base)
    del model
    gc.collect()
    assert base() is None


def test_a_base_leaves_the_device_once_others_need_it(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base stays while one of its policies is bound, and for the next one; policies over another
    base, and other processes, find the device free. On a CPU, as if it were another device."""
    monkeypatch.setattr(parameter_memory, "is_host", lambda _: False)
    spec = lora_spec(tokenizer)
    one, two = (learner_of(spec, name) for name in ("a", "b"))
    base = adapter(one.model).base
    assert isinstance(base, FrozenBase)
    values = {name: p.clone() for name, p in base.module.named_parameters()}

    def away() -> bool:
        assert all(torch.equal(p, values[name]) for name, p in base.module.named_parameters())
        return base._movable._away

    def suspend(learner: Learner) -> Callable[[], None]:
        tensors, plain = learner.suspended()
        stored = {name: t.detach().clone() for name, t in tensors.items()}
        learner.release()
        return lambda: learner.adopt(stored, plain)

    resume_one = suspend(one)
    leave_unused_bases()
    assert not away()  # the other policy is bound
    resume_two = suspend(two)
    assert not away()
    resume_one()
    suspend(one)
    assert not away()
    resume_two()
    suspend(two)
    leave_unused_bases()
    assert away()
    resume_two()
    assert not away()
    suspend(two)
    other = learner_of(lora_spec(tokenizer, ["c"]).model_copy(update={"seed": 5}), "c")
    assert adapter(other.model).base is not base
    assert away()
    resume_two()
    assert not away()


def test_the_same_weights_under_two_paths_are_one_base(tokenizer: Path, tmp_path: Path) -> None:
    whole = load_model("x", make_spec(tokenizer).policies["solver"], 0)
    bases = []
    for name in ("one", "two"):
        whole.save_pretrained(tmp_path / name)
        model = {"path": str(tmp_path / name), "tokenizer": str(tokenizer)}
        values = make_spec(tokenizer, model=model, policies=["a"]).model_dump(mode="json")
        values["policies"]["a"]["lora"] = {"rank": 2}
        spec = JobSpec.model_validate(values)
        bases.append(adapter(load_adapted("a", spec.policies["a"], 0, CPU)).base)
    assert bases[0].module is bases[1].module


def test_a_path_with_other_weights_is_another_base(tokenizer: Path, tmp_path: Path) -> None:
    whole = load_model("x", make_spec(tokenizer).policies["solver"], 0)
    whole.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "tokenizer": str(tokenizer)}
    values = make_spec(tokenizer, model=model, policies=["a"]).model_dump(mode="json")
    values["policies"]["a"]["lora"] = {"rank": 2}
    spec = JobSpec.model_validate(values)
    before = adapter(load_adapted("a", spec.policies["a"], 0, CPU)).base
    assert adapter(load_adapted("a", spec.policies["a"], 0, CPU)).base is before
    with torch.no_grad():
        whole.model.norm.weight.add_(1)
    whole.save_pretrained(tmp_path / "base")
    after = adapter(load_adapted("a", spec.policies["a"], 0, CPU)).base
    assert after.checksum != before.checksum


def test_policies_begin_as_their_base_and_differ_in_their_adapters(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer)
    a, b = (load_adapted(name, spec.policies[name], spec.seed, CPU) for name in ("a", "b"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(a(ids).logits, b(ids).logits)
    one, two = (adapter(m).weights() for m in (a, b))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    again = adapter(load_adapted("a", spec.policies["a"], spec.seed, CPU)).weights()
    assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_the_adapter_and_merge_to_the_same_model(
    tokenizer: Path, dtype: str
) -> None:
    values = lora_spec(tokenizer, ["a"]).model_dump(mode="json")
    values["policies"]["a"]["model"]["dtype"] = dtype
    spec = JobSpec.model_validate(values)
    learner = learner_of(spec, "a")
    for step in range(3):
        learner.accumulate(make_rows(learner.model, 8, step, noise=0.3))
        learner.apply(step)
    published = learner.published()
    assert is_adapter(published)
    content = AdapterContent.of(published)
    base = adapter(learner.model).base
    assert content.base == base.checksum
    assert (content.rank, content.scale) == (4, 2.0)
    assert content.target_modules == (
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    )  # fmt: skip
    assert {t.dtype for t in content.tensors.values()} == {getattr(torch, dtype)}
    assert sum(t.nbytes for t in published.values()) < sum(
        t.nbytes for t in base.weights().values()
    )
    plain = copy.deepcopy(base.module)
    plain.load_state_dict(merged(base.weights(), content), strict=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs = learner.model(ids).logits.float(), plain(ids).logits.float()
        untouched = base.module(ids).logits.float()
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    assert (ours - untouched).abs().max() > 2 * tolerance


def test_the_divergence_of_an_adapter_is_measured_from_the_base(tokenizer: Path) -> None:
    """It is zero at first, and positive once the adapter has changed."""
    values = lora_spec(tokenizer, ["a"]).model_dump(mode="json")
    values["algorithm"] = {"kl_coefficient": 1.0}
    spec = JobSpec.model_validate(values)
    learner = learner_of(spec, "a")
    assert learner.needs_reference
    first = {n: t.clone() for n, t in learner.weights().items()}
    learner.set_reference(first)
    learner.accumulate(make_rows(learner.model, 6, 0))
    assert learner.apply(0).metrics["kl"] == pytest.approx(0, abs=1e-6)
    learner.accumulate(make_rows(learner.model, 6, 1))
    assert learner.apply(1).metrics["kl"] > 0


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("begins", ["as the base", "elsewhere"])
def test_packed_rows_give_the_textbook_gradient(
    tokenizer: Path, begins: str, checkpointed: bool
) -> None:
    """In passes of many rows, also of the reference: the base, with or without an adapter."""
    values = lora_spec(tokenizer, ["a"]).model_dump(mode="json")
    values["algorithm"] = {"kl_coefficient": 0.5, "entropy_coefficient": 0.01}
    values["policies"]["a"]["optimizer"]["max_grad_norm"] = 1e9
    values["policies"]["a"]["trainer"] = {"activation_checkpointing": checkpointed}
    spec = JobSpec.model_validate(values)
    learner = learner_of(spec, "a")
    model = learner.model
    generator = torch.Generator().manual_seed(3)

    def elsewhere() -> None:
        for parameter in adapter(model).named.values():
            parameter.data.normal_(std=0.1, generator=generator)

    if begins == "elsewhere":
        elsewhere()
    learner.set_reference({n: t.clone() for n, t in learner.weights().items()})
    first = copy.deepcopy(model).double()
    elsewhere()
    exact = copy.deepcopy(model).double()
    rows = random_rows(exact, 5, Shape(groups=4, members=6, prompt=12))
    wanted = full_batch_gradient(exact.requires_grad_(True), rows, spec, first)
    wanted = {name: grad for name, grad in wanted.items() if ".lora_" in name}

    for start in range(0, len(rows), 7):
        learner.accumulate(rows[start : start + 7])
    assert learner._passes._layout["packed"]
    found: dict[str, torch.Tensor] = {}

    def look(*_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in model.named_parameters() if n in wanted})

    learner._optimizer.register_step_pre_hook(look)
    applied = learner.apply(0)
    assert applied.applied
    assert applied.metrics["kl"] > 1e-3
    assert relative_error(found, wanted) < 5e-5


def test_dropout_is_for_gradients_only(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer, ["a"], dropout=0.5)
    model = load_adapted("a", spec.policies["a"], 0, CPU)
    for parameter in adapter(model).named.values():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("lora", "field", "message"),
    [
        ({"target_modules": ["q_proj", "query"]}, "target_modules", "no such linear layer"),
        ({"target_modules": ["lm_head"]}, "target_modules", "no such linear layer"),
        ({"rank": 33}, "rank", "hidden size is 32"),
    ],
)
def test_impossible_adapters_of_a_model_are_refused(
    tokenizer: Path, lora: dict[str, Any], field: str, message: str
) -> None:
    spec = lora_spec(tokenizer, ["a"], **lora)
    with pytest.raises(InvalidArgument, match=message) as caught:
        load_adapted("a", spec.policies["a"], 0, CPU)
    assert caught.value.kind == "lora_invalid"
    assert caught.value.field == f"policies.a.lora.{field}"
    assert caught.value.remedy


def test_damaged_adapters_are_refused(tokenizer: Path) -> None:
    spec = lora_spec(tokenizer, ["a"])
    good = learner_of(spec, "a").published()
    name = next(n for n in good if n.endswith("lora_A.weight"))
    with pytest.raises(NotAnAdapter, match="not pairs"):
        AdapterContent.of({n: t for n, t in good.items() if n != name})
    with pytest.raises(NotAnAdapter, match="its rank is 4"):
        AdapterContent.of({**good, name: good[name][:2]})
    with pytest.raises(NotAnAdapter, match="no tensor"):
        AdapterContent.of({name: good[name]})
    broken = torch.frombuffer(bytearray(json.dumps({"rank": 4}).encode()), dtype=torch.uint8)
    with pytest.raises(NotAnAdapter, match="description"):
        AdapterContent.of({**good, "adapter.json": broken})


def test_transposed_layers_of_gpt2_merge_with_an_adapter(tokenizer: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = {"config": config, "tokenizer": str(tokenizer)}
    values = make_spec(tokenizer, model=model, policies=["a"]).model_dump(mode="json")
    values["policies"]["a"]["lora"] = {"rank": 4}
    spec = JobSpec.model_validate(values)
    adapted = load_adapted("a", spec.policies["a"], 0, CPU)
    own = adapter(adapted)
    for parameter in own.named.values():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(own.base.module)
    state = merged(own.base.weights(), own.content(torch.float32))
    plain.load_state_dict(state, strict=False)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, plain(ids).logits, rtol=0, atol=1e-4)


def test_the_folder_of_an_adapter_is_refused_as_a_model(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    model = {"path": str(tmp_path), "tokenizer": str(tokenizer)}
    spec = make_spec(tokenizer, model=model)
    with pytest.raises(InvalidArgument, match="without its base model") as caught:
        load_model("solver", spec.policies["solver"], 0)
    assert caught.value.kind == "model_is_adapter"
    assert "lora.path" in (caught.value.remedy or "")

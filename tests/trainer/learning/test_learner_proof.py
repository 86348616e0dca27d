"""Proofs by a learner: the log-probs that transformers computes with the published weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.learning.learner import Learner
from services.trainer.learning.model import load_adapted, load_model, load_tokenizer
from tests.support.training import make_spec, tiny_config
from tests.trainer.learning.test_learner import make_rows
from tests.trainer.learning.test_lora import lora_spec
from troupe.checkpoints.adapters import AdapterContent, merged
from troupe.checkpoints.format import ModelArrangement
from troupe.checkpoints.proof import Proof, passage_ids
from troupe.job import JobSpec

MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def spec_of(tokenizer: Path, dtype: str, **config: Any) -> JobSpec:
    model = {"config": tiny_config(**config), "tokenizer": str(tokenizer), "dtype": dtype}
    return make_spec(tokenizer, model=model)


def plain(spec: JobSpec, published: dict[str, torch.Tensor], proof: Proof) -> torch.Tensor:
    """Return log-probs of the proof's prompt by a forward pass of transformers in float32."""
    model = load_model("solver", spec.policies["solver"], spec.seed)
    values = ModelArrangement.of(model, published).arranged(published)
    model.load_state_dict({n: t.float() for n, t in values.items()}, strict=False)
    prompt = torch.tensor([proof.ids])
    with torch.no_grad():
        logits = model(prompt).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, prompt[0, 1:, None])[:, 0]


@pytest.mark.parametrize("config", [{}, MIXTURE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_proves_each_version_that_it_publishes(
    tokenizer: Path, dtype: str, config: dict[str, Any]
) -> None:
    """In the published type: the float32 weights of training give other log-probs."""
    spec = spec_of(tokenizer, dtype, **config)
    model = load_model("solver", spec.policies["solver"], spec.seed)
    learner = Learner(model, spec, "solver")
    passage = passage_ids(load_tokenizer("solver", spec.policies["solver"]))
    before: Proof | None = None
    for step in range(2):
        learner.accumulate(make_rows(learner.model, 8, step, noise=0.3))
        assert learner.apply(step).applied
        proof = learner.proof(passage)
        assert proof is not None
        published = {name: tensor.clone() for name, tensor in learner.published().items()}
        expected = plain(spec, published, proof)
        torch.testing.assert_close(torch.tensor(proof.logprobs), expected, rtol=1e-5, atol=1e-5)
        proof.check(expected.tolist())
        assert before is None or before.logprobs != proof.logprobs
        before = proof
    # A proof is not a step: the learner continues as without it.
    learner.accumulate(make_rows(learner.model, 8, 2, noise=0.3))
    assert learner.apply(2).applied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_and_its_base_have_separate_proofs(tokenizer: Path, dtype: str) -> None:
    values = lora_spec(tokenizer, ["solver"]).model_dump(mode="json")
    values["policies"]["solver"]["model"]["dtype"] = dtype
    spec = JobSpec.model_validate(values)
    model = load_adapted("solver", spec.policies["solver"], spec.seed, torch.device("cpu"))
    learner = Learner(model, spec, "solver")
    for step in range(2):
        learner.accumulate(make_rows(learner.model, 8, step, noise=0.3))
        assert learner.apply(step).applied
    assert learner.base is not None
    base = dict(learner.base.weights())
    content = AdapterContent.of(learner.published())
    proofs = {"base": learner.proof((), "base"), "published": learner.proof(())}
    exact = {name: tensor.float() for name, tensor in base.items()}
    wanted = {"base": base, "published": merged(exact, content)}
    for what, proof in proofs.items():
        assert proof is not None
        expected = plain(spec, wanted[what], proof)
        torch.testing.assert_close(torch.tensor(proof.logprobs), expected, rtol=1e-5, atol=1e-5)
    assert proofs["base"] is not None
    assert proofs["published"] is not None
    assert proofs["base"].logprobs != proofs["published"].logprobs

"""The proof of a version: right weights pass whatever rounds them, one wrong tensor does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedTokenizerFast

from tests.support.architectures import ARCHITECTURES, make
from troupe.checkpoints import proof as proofs
from troupe.checkpoints.adapters import distinct_tensors
from troupe.checkpoints.format import CheckpointFormat, cast
from troupe.checkpoints.proof import (
    PASSAGE,
    Proof,
    ProofFailed,
    Prover,
    metadata_of,
    passage_ids,
    prompt_of,
    proof_in,
    spread_ids,
)
from troupe.transfer import DeferredTensors, TensorGroup
from troupe.v1 import common_pb2 as common_pb

# Dense, tied, mixtures of other forms; the rest is like one of them.
SORTS = ("qwen3_moe", "gpt_oss", "llama4", "deepseek_v3", "qwen3_tied", "gemma3", "gpt2")
Published = dict[str, torch.Tensor]
Disturb = Callable[[torch.Tensor], torch.Tensor]


def published(model: Any, dtype: torch.dtype) -> Published:
    return dict(CheckpointFormat(model, dtype).of(distinct_tensors(model)))


def in_float32(name: str, dtype: torch.dtype) -> Any:
    """The model with its published values."""
    model = make(name)
    values = dict(CheckpointFormat(model, dtype).rounded(distinct_tensors(model)))
    model.load_state_dict({n: t.to(torch.float32) for n, t in values.items()}, strict=False)
    model.tie_weights()
    return model


def logprobs(model: Any, ids: Iterable[int]) -> torch.Tensor:
    """Return the log-probs of `ids` after the first, from the model's own forward pass."""
    prompt = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(prompt, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, prompt[0, 1:, None])[:, 0]


def disturbed(model: Any, disturb: Disturb) -> Any:
    """`model` with `disturb` behind each of its single modules."""

    def one(value: Any) -> Any:
        exact = torch.is_tensor(value) and value.dtype == torch.float32
        return disturb(value) if exact else value

    def after(_module: Any, _inputs: Any, output: Any) -> Any:
        return tuple(map(one, output)) if isinstance(output, tuple) else one(output)

    for name, module in model.named_modules():
        if next(module.children(), None) is None and "rotary" not in name:
            module.register_forward_hook(after)
    return model


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32)


def noise() -> Disturb:
    """Relative errors up to one unit of bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def disturb(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + 2**-8 * (2 * torch.rand(value.shape, generator=generator) - 1))

    return disturb


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SORTS else pytest.mark.slow) for n in ARCHITECTURES]
)
def test_log_probs_computed_by_layers_equal_the_whole_model_s(
    name: str, dtype: torch.dtype
) -> None:
    """Computed from a trainer's tensors, and from the tensors in a checkpoint."""
    model = make(name)
    prover = Prover(model.config)
    tensors = CheckpointFormat(model, dtype).rounded(distinct_tensors(model))
    proof = prover.prove(tensors, ())
    found = torch.tensor(proof.logprobs)
    assert len(proof.ids) == len(found) + 1 > 60
    torch.testing.assert_close(found, logprobs(in_float32(name, dtype), proof.ids))
    reference = prover.reference
    read = reference.logprobs(reference.arranged(published(model, dtype)), proof.ids)
    torch.testing.assert_close(read, found)
    other = reference.logprobs(reference.arranged(published(make(name, 1), dtype)), proof.ids)
    with pytest.raises(ProofFailed):
        proof.check(other.tolist())


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen2_moe", "minimax_m2", "granitemoe"]
)
def test_right_weights_pass_with_other_roundings_than_the_measured_one(name: str) -> None:
    """Other kernels of attention, residuals in float32, and random errors, all of which also move
    tokens to other experts."""
    model = make(name)
    prover = Prover(model.config)
    tensors = CheckpointFormat(model, torch.bfloat16).rounded(distinct_tensors(model))
    proof = prover.prove(tensors, ())
    served = cast(make(name), torch.bfloat16)
    served.set_attn_implementation("eager")
    servers = [
        served,
        disturbed(in_float32(name, torch.bfloat16), rounded),
        disturbed(in_float32(name, torch.bfloat16), noise()),
    ]
    for server in servers:
        found = logprobs(server, proof.ids)
        assert not torch.equal(found, torch.tensor(proof.logprobs))
        proof.check(found.tolist())


def wrong(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return its values in another order; a constant's values change by a half."""
    values = tensor.float()
    if float(values.std()) > 1e-3:
        order = torch.randperm(values.numel(), generator=generator)
        return values.flatten()[order].view_as(values).to(tensor.dtype)
    return (values * (1 + 0.5 * torch.randn(values.shape, generator=generator))).to(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("qwen3_tied", 0), ("qwen3_moe", 2)])
def test_one_wrong_tensor_of_any_layer_is_refused(name: str, seed: int, dtype: torch.dtype) -> None:
    """Also in bfloat16, by a server that rounds as much as the bound was measured for."""
    model = make(name, seed)
    prover, right = Prover(model.config), published(model, dtype)
    reference = prover.reference
    proof = prover.prove(reference.arranged(right), ())
    served = reference.logprobs(reference.arranged(right), proof.ids, rounded=True)
    proof.check(served.tolist())
    generator, accepted = torch.Generator().manual_seed(0), []
    for one, tensor in right.items():
        changed = reference.arranged(right | {one: wrong(tensor, generator)})
        found = reference.logprobs(changed, proof.ids, rounded=True)
        try:
            proof.check(found.tolist())
        except ProofFailed:
            continue
        accepted.append(one)
    assert not accepted


def test_log_probs_that_are_not_numbers_or_too_few_are_refused() -> None:
    proof = Proof((1, 2, 3), (-1.0, -2.0), 0.1)
    proof.check([-1.05, -2.1])
    for found in ([-1.0, float("nan")], [-1.0], [-1.3, -2.0]):
        with pytest.raises(ProofFailed):
            proof.check(found)


def test_the_bound_is_measured_for_several_versions() -> None:
    """A second pass over all weights is made for the first version, and later again."""
    model, reads = make("qwen3"), 0

    def counted(group: TensorGroup) -> TensorGroup:
        def made() -> Any:
            nonlocal reads
            reads += 1
            return group.make()

        return TensorGroup(group.layout, made)

    plain = CheckpointFormat(model, torch.bfloat16).rounded(distinct_tensors(model))
    tensors = DeferredTensors([counted(group) for group in plain.groups])
    prover, each, bounds = Prover(model.config), len(plain.groups), []
    for version in range(proofs._MEASURED_EVERY + 1):
        reads = 0
        bounds.append(prover.prove(tensors, ()).allowed)
        assert reads == each * (2 if version in (0, proofs._MEASURED_EVERY) else 1)
    assert len(set(bounds)) == 1


def test_a_proof_travels_with_its_version() -> None:
    proof = Proof((5, 7, 9), (-0.1, -12.25), 0.30000001192092896)
    sent = Proof.of(common_pb.WeightsRef(proof=proof.to_message()))
    assert sent is not None
    assert sent.ids == proof.ids
    assert sent.logprobs == pytest.approx(proof.logprobs)
    kept = proof_in(metadata_of(sent))
    assert kept == sent.to_message()  # JSON keeps every bit
    assert proof_in({}) is None
    assert proof_in({"proof": "of another release"}) is None
    assert Proof.of(common_pb.WeightsRef()) is None


def test_a_proof_is_cut_to_a_servers_context() -> None:
    proof = Proof((1, 2, 3, 4), (-1.0, -2.0, -3.0), 0.1)
    # A server takes prompts that are some tokens shorter than its context: SGLang 6.
    assert proof.within(11) == Proof((1, 2, 3), (-1.0, -2.0), 0.1)
    assert proof.within(12) == proof.within(4096) == proof


def test_the_prompt_is_english_where_the_tokenizer_knows_it() -> None:
    config = make("qwen3").config
    spread = spread_ids(config, 128)
    assert len(set(spread)) > 64
    assert passage_ids(None) == []
    # No text, ids of another vocabulary, one unknown token again and again.
    for passage in ([], range(200), [3] * 200):
        assert prompt_of(config, list(passage)) == spread
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.train_from_iterator([PASSAGE], WordLevelTrainer(special_tokens=["[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    config.vocab_size = len(tokenizer)
    found = prompt_of(config, passage_ids(tokenizer))
    assert len(found) == 128
    assert PASSAGE.startswith(tokenizer.decode(found)[:20])
    config.max_position_embeddings = 32
    assert prompt_of(config, passage_ids(tokenizer)) == found[:16]

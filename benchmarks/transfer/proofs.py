"""Whether servers are verified by log-probs that the trainer's device has computed.

A trainer's worker binds a tiny model that SGLang servers would serve, and publishes its first two
versions. Their proofs are compared with forward passes of transformers over what is published, in
the dtype in which a server computes, and with one wrong tensor.

    python -m benchmarks.transfer.proofs
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.command import scratch
from benchmarks.sglang import TINY
from services.chassis.telemetry import Telemetry
from services.rollout.engines.weights import skeleton
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import Frontier
from services.trainer.worker import TrainerWorker
from troupe.checkpoints.format import ModelArrangement
from troupe.checkpoints.proof import PASSAGE, Proof, ProofFailed
from troupe.job import JobSpec
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

_JOB: Final = "bench"
_POLICY: Final = "solver"
_WRONG: Final = "model.layers.1.mlp.down_proj.weight"


async def proof_on_trainer() -> bool:
    """Return whether versions come with proofs that a server of them gives, and no other."""
    with scratch() as place:
        settings = TrainerSettings(
            trainer_device="cpu",
            transfer_dir=Path(place) / "transfer",
            data_dir=Path(place) / "runs",
        )
        spec = _spec(Path(place) / "tokenizer")
        worker = TrainerWorker(settings, Telemetry())
        try:
            binding = worker.bindings.shell((_JOB, _POLICY), spec, spec.model_dump_json())
            await asyncio.to_thread(binding.load, 0, "")
            first = binding.versions.weights
            with torch.no_grad():
                for tensor in binding.learner.weights().values():
                    tensor.mul_(1.01)  # a step
            frontier = Frontier(1, 1)
            second = await asyncio.to_thread(binding.versions.persist, frontier, keeping=True)
            transfer = Transfer(settings.transfer_dir)
            return all(_proven(transfer, ref) for ref in (first, second))
        finally:
            await worker.stop()


def _proven(transfer: Transfer, ref: common_pb.WeightsRef) -> bool:
    proof = Proof.of(ref)
    if proof is None:
        return False
    published, _ = transfer.get(ref.key, expected_checksum=ref.checksum)
    proof.check(_served(published, proof.ids))
    other = published[_WRONG].flip(0)
    try:
        proof.check(_served({**published, _WRONG: other}, proof.ids))
    except ProofFailed:
        return True
    return False


def _served(published: dict[str, torch.Tensor], ids: tuple[int, ...]) -> list[float]:
    """Log-probs of `ids` by a forward pass of transformers, in the published dtype."""
    model = skeleton(AutoConfig.for_model(**_CONFIG), "bfloat16", _POLICY)
    model.load_state_dict(dict(ModelArrangement.of(model, published).arranged(published)))
    prompt = torch.tensor([ids])
    with torch.no_grad():
        logits = model(prompt).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(1, prompt[0, 1:, None])[:, 0]
    logprobs: list[float] = found.tolist()
    return logprobs


# Weights of such a size that each of them counts, as in a trained model.
_CONFIG: Final = TINY | {"initializer_range": 0.2, "tie_word_embeddings": False}


def _spec(tokenizer: Path) -> JobSpec:
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    words.train_from_iterator([PASSAGE], WordLevelTrainer(special_tokens=["[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tokenizer)
    model = {"config": _CONFIG, "dtype": "bfloat16", "tokenizer": str(tokenizer)}
    return JobSpec.model_validate(
        {
            "name": _JOB,
            "agents": {_POLICY: {"policy": _POLICY}},
            "policies": {_POLICY: {"model": model, "engine": {"kind": "sglang"}}},
            "workflow": "a.b:play",
            "pipeline": {"queries_per_step": 1, "steps": 1},
            "tasks": {"source": "a.b:Tasks"},
        }
    )


if __name__ == "__main__":
    print(json.dumps({"proof_on_trainer": asyncio.run(proof_on_trainer())}))

"""A team small enough to train within seconds: two random policies that learn to say "a".

The workflow functions and tasks are imported by the services by name (`tests.support.tiny_team`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.jobs import job_text
from troupe.workflow import branch

LETTERS = "abcdefgh ?"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' or not loop.last or add_generation_prompt %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(
    directory: Path,
    *,
    hidden: int = 32,
    layers: int = 1,
    seed: int = 0,
    positions: int = 256,
    head_dim: int = 16,
) -> Path:
    """Save a random Qwen3 with a character tokenizer under `directory`."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    specials = ["<|pad|>", END, "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"]
    vocab = {token: i for i, token in enumerate([*specials, *LETTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token=END,
        unk_token="<|unk|>",
        additional_special_tokens=specials[2:5],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            eos_token_id=vocab[END],
            pad_token_id=vocab["<|pad|>"],
        )
    )
    model.save_pretrained(directory)
    return directory


class Tasks:
    """Questions of one letter; the splits share none."""

    def __init__(self, split: str, size: int = 64) -> None:
        self._letters = "abcdef" if split == "train" else "gh"
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": self._letters[index % len(self._letters)] + "?"}


class Demonstrations(Tasks):
    """The same questions with the right answers, alternately for the two agents."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        agent = ("solver", "checker")[index % 2]
        return {
            "prompt": super().__getitem__(index)["question"],
            "completion": "aaaa",
            "agent": agent,
        }


class Pairs(Tasks):
    """The same questions with a right and a wrong answer, alternately for the two agents."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "prompt": super().__getitem__(index)["question"],
            "chosen": "aaaa",
            "rejected": "bdfh"[index % 4] * 3,
            "agent": ("solver", "checker")[index % 2],
        }


class JointPairs(Tasks):
    """The same questions with right and wrong answers of both agents, one of whom may be right
    also where the team was not preferred."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        question = super().__getitem__(index)["question"]
        wrong = "bdfh"[index % 4] * 3
        return {
            "agents": {
                "solver": {"prompt": question, "chosen": "aaaa", "rejected": wrong},
                "checker": {
                    "prompt": question,
                    "chosen": "aaaa",
                    "rejected": wrong if index % 3 else "aaaa",
                },
            }
        }


def share_of_a(text: str) -> float:
    """How much of an answer is the letter a: the reward, in [0, 1]."""
    return text.count("a") / max(1, len(text))


async def play(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """The solver proposes, the checker criticises, the solver answers again."""
    question = {"role": "user", "content": query["question"]}
    draft = await agents["solver"].chat([question])
    critique = await agents["checker"].chat(query["question"] + draft.text)
    final = await agents["solver"].chat(
        [question, draft, {"role": "user", "content": critique.text}]
    )
    score = await tools.call("score", text=final.text)
    return {"solver": score, "checker": share_of_a(critique.text), "team": score}


async def trio(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Three roles answer one after another, and one that is not trained reads along."""
    said, rewards = query["question"], {}
    for role in ("solver", "checker", "judge"):
        reply = await agents[role].chat(said)
        rewards[role] = share_of_a(reply.text)
        said += reply.text
    await agents["reader"].chat(said)
    return {**rewards, "reader": 0.0, "team": sum(rewards.values()) / 3}


async def quartet(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Four roles answer at once, each for itself."""
    roles = ("solver", "checker", "judge", "writer")
    replies = await asyncio.gather(*(agents[role].chat(query["question"]) for role in roles))
    rewards = {role: share_of_a(reply.text) for role, reply in zip(roles, replies, strict=True)}
    return {**rewards, "team": sum(rewards.values()) / len(roles)}


async def shrug(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Every conversation earns the same, regardless of its text. Nine tenths have no exact
    float."""
    await agents["solver"].chat(query["question"])
    await agents["checker"].chat(query["question"])
    return {"solver": 0.9, "checker": 0.9, "team": 0.9}


async def tree(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """The same in a tree: three drafts, the best of which continues, and two answers to it."""
    question = {"role": "user", "content": query["question"]}

    def score(reply: Any) -> float:
        return share_of_a(reply.text)

    draft = await branch(agents["solver"], [question], n=3, score=score)
    critique = await agents["checker"].chat(query["question"] + draft.text)
    again = [question, draft, {"role": "user", "content": critique.text}]
    final = await branch(agents["solver"], again, n=2, score=score)
    return {"checker": share_of_a(critique.text), "team": final.reward or 0.0}


async def lines(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """Branches of several turns, which take a different time whenever they are played."""

    async def line(number: int) -> str:
        said: str = query["question"]
        for _ in range(1 + number):
            await asyncio.sleep(int.from_bytes(os.urandom(1), "big") / 5000)
            said = (await agents["solver"].chat(said)).text or "?"
        return said

    ends = await asyncio.gather(*(line(number) for number in range(3)))
    critique = await agents["checker"].chat("".join(ends))
    score = share_of_a("".join(ends))
    return {"solver": score, "checker": share_of_a(critique.text), "team": score}


async def raises(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """A bug in the user's workflow."""
    raise RuntimeError("the user's bug")


async def never_returns(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """A workflow that hangs."""
    await asyncio.sleep(3600)
    return {}


def job(models: Path, **changes: Any) -> str:
    """YAML of a job over models made in `models`/solver and `models`/checker.

    `changes` replace fields by dotted name: `job(m, **{"pipeline.mode": "sync"})`.
    """
    spec: dict[str, Any] = {
        "name": "tiny",
        "workflow": "tests.support.tiny_team:play",
        "tasks": {"source": "tests.support.tiny_team:Tasks"},
        "agents": {
            name: {"policy": name, "sampling": {"max_new_tokens": 6}}
            for name in ("solver", "checker")
        },
        "policies": {
            name: {
                "model": {"path": str(models / name)},
                "optimizer": {"lr": 0.01},
                "engine": {"max_context": 128},
            }
            for name in ("solver", "checker")
        },
        "tools": {"score": {"entrypoint": "tests.support.tiny_team:share_of_a"}},
        "pipeline": {
            "steps": 6,
            "queries_per_step": 4,
            "group_size": 8,
            "micro_batch_samples": 16,
        },
        "evaluation": {"queries": 8},
        "limits": {"trajectory_seconds": 200, "turn_seconds": 200, "step_seconds": 400},
        "logging": {"tensorboard": False},
    }
    return job_text(spec, changes)


async def annotated(query: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, float]:
    """One turn, with a value that is too large for the store: it is kept by reference."""
    import numpy as np

    reply = await agents["solver"].chat(query["question"])
    reply.columns["picture"] = np.ones(100_000, dtype=np.float32)
    critique = await agents["checker"].chat(reply.text or "?")
    score = share_of_a(reply.text)
    return {"solver": score, "checker": share_of_a(critique.text), "team": score}

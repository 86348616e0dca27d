"""CPU of a rollout service per turn, of short and of long conversations.

The engine is a paced SGLang server (`testbed.paced_server`) in a separate process: its own cost is
not counted, but the communication with it is. The conversations are like a job's: a template of
ChatML, a tokenizer of bytes and merges, about four characters per token.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.command import end
from benchmarks.rollout import served
from benchmarks.rollout.workload import JOB, POLICY
from benchmarks.workloads.plain_turns import history
from troupe.job import JobSpec

_START_SECONDS: Final = 300.0
_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTEXT: Final = 32_768


@dataclass(frozen=True)
class TurnShape:
    """Conversations of one kind. There are about as many tokens as words."""

    name: str
    trajectories: int
    turns: int
    opening: int
    """Words with which all conversations begin, prefilled once."""
    words: int
    """Words of each further message."""
    answer: int
    """Tokens of each reply."""
    workflow: str = "talk"


SHORT: Final = TurnShape("short", 256, 4, 0, 8, 64, "ask")
# Ten turns of 20k tokens of prompt on average.
LONG: Final = TurnShape("long", 32, 10, 18_500, 15, 200)
SHAPES: Final = (SHORT, LONG)


@dataclass(frozen=True)
class TurnCost:
    """The cost of turns of one shape. `prompt`: mean tokens of a turn's prompt. `idle`: CPU seconds
    per second of the same process without turns."""

    shape: TurnShape
    turns: float
    prompt: float
    cpu_seconds: float
    idle: float
    seconds: float

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU per turn, including the process's idle CPU."""
        return self.cpu_seconds / self.turns * 1e3

    @property
    def busy_cpu_ms(self) -> float:
        """Milliseconds of CPU per turn without the process's idle CPU."""
        return (self.cpu_seconds - self.idle * self.seconds) / self.turns * 1e3


def save_language(directory: Path) -> int:
    """Save a tokenizer of bytes and merges under `directory`; return the vocabulary's size."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([history(4000)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    return int(core.get_vocab_size())


def model_of(directory: Path) -> dict[str, Any]:
    """Return the policy's `model` section; save tokenizer and configuration under `directory`."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": _CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        "vocab_size": save_language(directory / "tokenizer"),
    }
    AutoConfig.for_model(**config).save_pretrained(directory / "model")
    return {"config": config, "tokenizer": str(directory / "tokenizer")}


@contextlib.contextmanager
def paced(directory: Path, answer: int, step_seconds: float) -> Iterator[str]:
    """Run a paced server; yield its URL."""
    port_file = directory / "paced.port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "testbed.paced_server", str(directory / "model")]
    options = [str(port_file), "--answer", str(answer), "--step-seconds", str(step_seconds)]
    process = subprocess.Popen([*command, *options])
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the paced server does not serve")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        end(process)


def job_of(shape: TurnShape, model: dict[str, Any], url: str, count: int) -> JobSpec:
    """Return a job whose trajectories are conversations of that shape."""
    module = "benchmarks.workloads.plain_turns"
    return JobSpec.model_validate(
        {
            "name": JOB,
            "workflow": f"{module}:{shape.workflow}",
            "tasks": {
                "source": f"{module}:Queries",
                "args": {"turns": shape.turns, "words": shape.words, "opening": shape.opening},
            },
            "agents": {POLICY: {"policy": POLICY, "sampling": {"max_new_tokens": shape.answer}}},
            "policies": {
                POLICY: {
                    "model": model,
                    "engine": {"kind": "sglang", "urls": [url], "max_running": count},
                }
            },
            "pipeline": {"steps": 1, "queries_per_step": 1},
            "limits": {"max_concurrent_trajectories": count},
        }
    )


async def cost_of(directory: Path, shape: TurnShape, *, step_seconds: float = 0.005) -> TurnCost:
    """Run the conversations of `shape` concurrently, after a warm-up."""
    model = model_of(directory)
    count = shape.trajectories
    with paced(directory, shape.answer, step_seconds) as url, served.service(directory) as where:
        address, process = where
        job = job_of(shape, model, url, count)
        async with served.prepared(address, directory, job) as stub:
            await served.run(stub, process, 900_000, max(1, count // 4))  # warm
            run = await served.run(stub, process, 0, count)
            idle = await served.idle_rate(process)
    return TurnCost(
        shape, run.turns, run.prompt_tokens / run.turns, run.cpu_seconds, idle, run.seconds
    )

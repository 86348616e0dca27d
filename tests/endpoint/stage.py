"""A rollout service whose engines follow a script, and a tokenizer whose template supports
tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.endpoint import dialogues
from tests.rollout.house import House, evaluation, make_spec, open_house, training
from tests.support.scripted_engine import Script
from tests.workflow.stage import make_tokenizer
from troupe import tensors
from troupe.rpc import new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

Event = rollout_pb.TrajectoryEvent
# Like Qwen2.5's, shortened.
TOOLED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Where a tokenizer of many merges differs from one of characters: "ad" is one token.
MERGES = (("a", "d"),)
END = 2
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TOKENIZER = make_tokenizer(TOOLED, MERGES)


@cache
def tokenizer_path() -> str:
    """A directory with the tokenizer, made once."""
    import tempfile

    path = tempfile.mkdtemp(prefix="troupe-test-tooled-")
    TOKENIZER.save_pretrained(path)
    return path


def spell(text: str) -> list[int]:
    """Ids of `text`, one per character: not what the tokenizer itself would give for "ad"."""
    vocabulary = TOKENIZER.get_vocab()
    return [vocabulary[character] for character in text]


def says(text: str) -> list[int]:
    """A response that ends by itself."""
    return [*spell(text), END]


def calls(name: str = "add", **arguments: Any) -> str:
    """A call as Hermes and Qwen write it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def in_turn(*replies: list[int]) -> Callable[[list[int]], list[int]]:
    """Speaks one after another; then the last one for ever."""
    left = list(replies)
    return lambda prompt: left.pop(0) if len(left) > 1 else left[0]


def text_of(ids: list[int]) -> str:
    """Return the text of `ids`, special tokens included."""
    return str(TOKENIZER.decode(ids, clean_up_tokenization_spaces=False))


class Row(NamedTuple):
    """A sample."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reward: float


class Stage:
    """A house with a scripted engine, in which a test's own function is the workflow."""

    def __init__(self, house: House, script: Script, spec: dict[str, Any]) -> None:
        self.house = house
        self.script = script
        self.spec = spec

    def begin_anew(self) -> None:
        """Engines say "ok" and hold nothing back."""
        self.script.speak = lambda prompt: says("ok")
        self.script.hold = None
        self.script.asked.clear()
        self.script.aborted = 0

    async def play(self, act: Callable[[Any, Any], Awaitable[dict[str, float]]]) -> Event:
        """One trajectory that is not trained."""
        return await self._play(act, evaluation(1))

    async def train(
        self, act: Callable[[Any, Any], Awaitable[dict[str, float]]]
    ) -> tuple[Event, list[Row]]:
        """One trajectory of a new job, and the samples that it left in the store."""
        self.house.job_id = new_id("job")
        await self.house.prepare_raw(self.spec)
        await self.house.open_step(queries=1, group_size=1)
        event = await self._play(act, training(1, 1))
        samples = sorted(await self.house.samples("big"), key=lambda sample: sample.turn)
        return event, [
            Row(_ids(s.prompt_ids), _ids(s.response_ids), _floats(s.logprobs), s.reward)
            for s in samples
        ]

    async def _play(
        self,
        act: Callable[[Any, Any], Awaitable[dict[str, float]]],
        tickets: Sequence[rollout_pb.Ticket],
    ) -> Event:
        dialogues.ACT = act
        [event] = (await self.house.run(tickets)).values()
        return event


@asynccontextmanager
async def open_stage(
    directory: Path, *, context: int = 2048, **options: Any
) -> AsyncIterator[Stage]:
    """A prepared job on a separate house; `options` are for `open_house`.

    `context`: tokens, each of which is a character.
    """
    script = Script(lambda prompt: says("ok"))
    changes = {
        "agents": {name: {"sampling": {"max_new_tokens": 200}} for name in ("solver", "checker")},
        "policies": {
            "big": {
                "model": {
                    "tokenizer": tokenizer_path(),
                    "config": {"max_position_embeddings": context},
                },
                "engine": {"max_context": context},
            }
        },
        "limits": options.pop("limits", {}),
        "tools": options.pop("tools", {}),
    }
    async with open_house(directory, make=script.make, **options) as house:
        spec = {**make_spec("one_turn", **changes), "workflow": f"{dialogues.__name__}:acts"}
        await house.prepare_raw(spec)
        yield Stage(house, script, spec)


def _ids(tensor: common_pb.Tensor) -> list[int]:
    return [int(i) for i in tensors.from_proto(tensor)]


def _floats(tensor: common_pb.Tensor) -> list[float]:
    return [round(float(x), 4) for x in tensors.from_proto(tensor)]

"""A character tokenizer and a scripted backend: a workflow without any service."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from troupe.workflow import Agents, ChatTokenizer, Role, Sampling
from troupe.workflow.backend import GeneratedTurn

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
CHARACTERS = "\n " + string.ascii_letters + string.digits + string.punctuation
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}",
)
# As Qwen3's: thoughts of earlier replies are cut from the history.
THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


def make_tokenizer(
    template: str | None = CHATML, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """One token per character, plus one per merge (which real tokenizers have thousands of)."""
    words = [PAD, START, END, *CHARACTERS, *("".join(m) for m in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_chat(
    template: str | None = CHATML, merges: Sequence[tuple[str, str]] = ()
) -> ChatTokenizer:
    """The same, as a workflow uses it."""
    return ChatTokenizer(make_tokenizer(template, merges))


def make_beginning_chat() -> tuple[ChatTokenizer, int]:
    """The same with a tokenizer that begins sequences with a token, as Llama's; and this token."""
    tokenizer = make_tokenizer()
    first: int = tokenizer.convert_tokens_to_ids(START)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, first)]
    )
    return ChatTokenizer(tokenizer), first


@dataclass
class Script:
    """A backend that answers what `speak(agent, prompt ids, sampling)` returns, after `delay`."""

    speak: Callable[[str, tuple[int, ...], Sampling], list[int]]
    delay: Callable[[int], float] = lambda n: 0.0
    asked: list[tuple[str, tuple[int, ...], Sampling]] = field(default_factory=list)

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        number = len(self.asked)
        self.asked.append((agent, tuple(prompt_ids), sampling))
        await asyncio.sleep(self.delay(number))
        ids = self.speak(agent, tuple(prompt_ids), sampling)
        stopped = bool(ids) and ids[-1] == 2
        return GeneratedTurn(ids, [-0.5] * len(ids), (), "stop" if stopped else "length")


def make_agents(
    backend: Script, chat: ChatTokenizer | None = None, *, seed: int = 7, system: str | None = None
) -> Agents:
    """A solver and a checker on one tokenizer."""
    chat = chat or make_chat()
    roles = {
        name: Role(name, f"{name}-policy", chat, Sampling(max_new_tokens=32), system)
        for name in ("solver", "checker")
    }
    return Agents(roles, backend, seed=seed)

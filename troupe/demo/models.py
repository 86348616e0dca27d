"""The team's two models and their tokenizer: Qwen3, small enough for one core.

The tokenizer has characters, and the fixed phrases of the questions as single tokens. It is an
ordinary `PreTrainedTokenizerFast` with a chat template, so the workflow talks to it as to any
other; small models just should not spend their few layers on reading boilerplate. `train_step` and
`answer_all` are what a warm-start needs of a model: learn answers, give answers.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from troupe.demo.workflow import Message

PAD: Final = "<pad>"
END: Final = "<end>"
USER: Final = "<user>"
ASSISTANT: Final = "<assistant>"
UNKNOWN: Final = "<unk>"
SPECIALS: Final = (PAD, END, USER, ASSISTANT, UNKNOWN)

PHRASES: Final = (
    "spell backward: ",
    "rotate 90 degrees:",
    "rotate 180 degrees:",
    "rotate 270 degrees:",
    "horizontally mirror the matrix:",
    "vertically mirror the matrix:",
    "mirror the matrix along the diagonal:",
    "mirror the matrix along the counterdiagonal:",
    "\nanswer: ",
)
CHARACTERS: Final = "\n " + string.ascii_lowercase + string.digits + string.punctuation

TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<end>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# name -> (hidden size, layers, heads, feed-forward size)
SIZES = {"solver": (96, 4, 6, 192), "checker": (64, 3, 4, 128)}

# At d=96 a short rotary base learns to look a fixed number of characters back far sooner than the
# usual 10,000, which is made for long texts.
ROPE_THETA = 100.0

MAX_NEW_TOKENS = 16
_GENERATE_BATCH = 160


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build it; the same every time."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS, *PHRASES])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    longest_first = sorted(PHRASES, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    return chat_tokenizer(core)


def chat_tokenizer(core: Tokenizer) -> PreTrainedTokenizerFast:
    """`core`, whose vocabulary has the special tokens, with the marks of a conversation."""
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """`solver` or `checker` with random weights drawn from `seed`."""
    hidden, layers, heads, feed_forward = SIZES[name]
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=16,
            intermediate_size=feed_forward,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


@dataclass(frozen=True)
class AnswerToLearn:
    """A conversation and the answer to learn."""

    messages: list[Message]
    answer: str


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def train_step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[AnswerToLearn],
) -> float:
    """One cross-entropy step on the answers' tokens (and their end); returns the loss in nats."""
    prompts = [prompt_ids(tokenizer, row.messages) for row in rows]
    answers = [
        [*tokenizer(row.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for row in rows
    ]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    model.train()
    # Padding on the right: causal attention never looks at it.
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def answer_all(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]
) -> list[str]:
    """The model's greedy answers."""
    model.eval()
    prompts = [prompt_ids(tokenizer, messages) for messages in conversations]
    out = [""] * len(prompts)
    # Alike lengths together: less padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    greedy: Any = GenerationConfig(
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for start in range(0, len(order), _GENERATE_BATCH):
        chosen = order[start : start + _GENERATE_BATCH]
        batch = tokenizer.pad(
            {"input_ids": [prompts[i] for i in chosen]}, padding_side="left", return_tensors="pt"
        )
        made = model.generate(**batch, generation_config=greedy)
        width = batch["input_ids"].shape[1]
        texts = tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            out[i] = text
    return out

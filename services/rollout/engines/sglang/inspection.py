"""Whether a server that answers is the policy's model, and one that can be trained with."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from transformers import AutoTokenizer, PretrainedConfig

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.sglang import launch
from services.rollout.engines.sglang.client import BrokenReply, Refused, ServerGone, SglangClient
from services.rollout.engines.sglang.features import Features
from troupe.job import ModelSpec

# Letters, digits, white space and signs beyond ASCII: tokenizers that agree here agree.
_TEXT: Final = "Troupe: 3 agents, x = 17.5 + y\n\tcaf\u00e9 \u2192 \u4e2d\u6587 isn't it?"


async def inspect(
    client: SglangClient,
    policy: str,
    config: PretrainedConfig,
    *,
    deterministic: bool,
    tokenizer: ModelSpec | None = None,
) -> tuple[Features, dict[str, Any]]:
    """What the server can do and its own description.

    Raises `EngineStartFailed` naming `engine.urls` when it is no SGLang server, cannot be updated,
    or serves another model than `config`: another type, another vocabulary or, where `tokenizer` is
    given and the server has one, another tokenizer.
    """

    def refused(reason: str, remedy: str) -> EngineStartFailed:
        return EngineStartFailed(
            reason, field=f"policies.{policy}.engine.urls", value=client.url, remedy=remedy
        )

    try:
        features = await _features(client)
        info = await client.server_info()
        model_type = (await client.model_info()).get("model_type")
        # Releases that cannot retract may not look at the ids of a bias before they use them.
        vocabulary = await client.vocabulary() if features.retract else None
        theirs = await client.tokenize(_TEXT) if tokenizer else None
    except (ServerGone, BrokenReply, Refused) as error:
        raise refused(
            f"this is no usable SGLang server: {error}",
            "Give the address of an SGLang server, 0.4.6 or later.",
        ) from error
    if info.get("dp_size", 1) != 1:
        raise refused(
            "its weights cannot be updated: it runs data-parallel",
            "Run one server per replica, with --dp-size 1.",
        )
    if deterministic and not info.get("enable_deterministic_inference"):
        raise refused(
            "it was not started for deterministic inference, which `pipeline.deterministic` "
            "asks for",
            f"Start it with {launch.DETERMINISTIC} (releases from 0.5.3).",
        )
    if model_type is not None and model_type != config.model_type:
        raise refused(
            f"it serves a '{model_type}', the policy is a '{config.model_type}'",
            "Start it with the policy's model.",
        )
    ours = config.get_text_config().vocab_size
    if vocabulary is not None and vocabulary != ours:
        raise refused(
            f"it has a vocabulary of {vocabulary} tokens, the policy one of {ours}",
            "Start it with the policy's model.",
        )
    if theirs is not None and tokenizer is not None:
        expected = await asyncio.to_thread(_ids, tokenizer)
        if expected is not None and theirs != expected:
            raise refused(
                "it has another tokenizer than the policy: the same text gives other ids",
                "Start it with the policy's model and tokenizer.",
            )
    return features, info


async def _features(client: SglangClient) -> Features:
    try:
        return await client.features()
    except Refused:  # served without its documentation: assume the oldest
        return Features.of({})


def _ids(model: ModelSpec) -> list[int] | None:
    """The policy's own ids of the text; None when its tokenizer cannot be loaded here."""
    try:
        loaded = AutoTokenizer.from_pretrained(model.tokenizer_source, revision=model.revision)
    except (OSError, ValueError):
        return None
    ids: list[int] = loaded.encode(_TEXT, add_special_tokens=False)
    return ids

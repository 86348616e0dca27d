"""Parsers of an SGLang server's features, load report and replies."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.rollout.engines.errors import BrokenReply
from services.rollout.engines.servers.interface import (
    ServerLoad,
    ServerReply,
    VersionName,
    logprobs_of,
)
from troupe.mixtures import RoutingShape


@dataclass(frozen=True)
class Features:
    """Features of a server, read from its OpenAPI document.

    `retract`: a pause can return running turns to the queue; otherwise they are aborted and
    continued by us. `in_place`: it can leave them where they are, with their keys and values, and
    requests can say whose cached prefixes they share. `tensors`: weights can be sent as tensors;
    `sessions`: such updates run between begin and end. `buckets`: tensors can be sent as flat ones,
    `groups`: in process groups, too. `version_call`: the version can be set by
    itself, without aborting turns. `memory`: weights and key-value cache can be released.
    `adapter_tensors`: LoRA adapters can be loaded from tensors. `loads`: path of the load report.
    """

    retract: bool
    in_place: bool
    pause: bool
    tensors: bool
    sessions: bool
    buckets: bool
    groups: bool
    version_call: bool
    memory: bool
    adapter_tensors: bool
    loads: str | None

    @staticmethod
    def of(document: Mapping[str, Any]) -> Features:
        """Read from an OpenAPI document."""
        paths = document.get("paths", {})
        schemas = document.get("components", {}).get("schemas", {})
        pause = _fields(schemas, "PauseGenerationReqInput")
        generate = _fields(schemas, "GenerateReqInput")
        loads = next((path for path in ("/v1/loads", "/get_load") if path in paths), None)
        return Features(
            retract="/pause_generation" in paths and "mode" in pause,
            in_place="mode" in pause and "extra_key" in generate,
            pause="/pause_generation" in paths,
            tensors="/update_weights_from_tensor" in paths,
            sessions="/begin_weight_update" in paths,
            buckets="load_format" in _fields(schemas, "UpdateWeightsFromTensorReqInput"),
            groups="load_format" in _fields(schemas, "UpdateWeightsFromDistributedReqInput"),
            version_call="/update_weight_version" in paths,
            memory={"/release_memory_occupation", "/resume_memory_occupation"} <= set(paths),
            adapter_tensors="/load_lora_adapter_from_tensors" in paths,
            loads=loads,
        )


def _fields(schemas: Mapping[str, Any], name: str) -> Collection[str]:
    """The fields of a request in an OpenAPI document."""
    fields: Collection[str] = schemas.get(name, {}).get("properties", {})
    return fields


def load_of(reply: Mapping[str, Any]) -> ServerLoad:
    """Read `/v1/loads`, or `/get_load` of older releases: summed over the server's schedulers, of
    `kv_usage` the largest and of `cache_hit_rate` the mean. Raises AttributeError, TypeError or
    ValueError for anything else."""
    entries = reply.get("loads", reply)
    entries = entries if isinstance(entries, list) else [entries]
    rates = [float(e.get("cache_hit_rate") or 0) for e in entries]
    return ServerLoad(
        # The older report counts all requests together.
        running=sum(
            int(e.get("num_running_reqs", e.get("num_reqs", 0) - e.get("num_waiting_reqs", 0)))
            for e in entries
        ),
        waiting=sum(int(e.get("num_waiting_reqs", 0)) for e in entries),
        uncached_tokens=sum(int(e.get("num_waiting_uncached_tokens", 0)) for e in entries),
        kv_usage=max((float(e.get("token_usage") or 0) for e in entries), default=0.0),
        cache_hit_rate=sum(rates) / len(rates) if rates else 0.0,
    )


def reply_of(meta: Mapping[str, Any]) -> ServerReply:
    """Read `meta_info` of a generation. Raises `BrokenReply`."""
    try:
        # An abort before prefill has no log-probs at all.
        rows = meta.get("output_token_logprobs") or []
        given, ids, *_ = zip(*rows, strict=False) if rows else ((), ())
        tokens, logprobs = list(map(int, ids)), logprobs_of(given)
        finish, named = meta["finish_reason"], meta.get("weight_version")
        count = meta.get("completion_tokens", len(tokens))
        if count != len(tokens):
            raise BrokenReply(f"{count} tokens, but {len(tokens)} log-probs")
        return ServerReply(
            tokens,
            logprobs,
            aborted=str(finish["type"]) == "abort",
            message=str(finish.get("message") or ""),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            # Older releases name the version that was loaded at the end alone.
            spans=[
                VersionName(str(span["version"]), int(span["start"]), int(span["end"]))
                for span in meta.get("weight_versions") or ()
            ],
            last_name=None if named is None else str(named),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"not the answer to a generation: {error!r}") from error


def routes_of(
    reply: ServerReply, meta: Mapping[str, Any], shape: RoutingShape, tokens: int
) -> ServerReply:
    """`reply` with the experts that the first `tokens` - 1 of prompt and response were sent to,
    [tokens - 1, layers, k]: int32 in base64, of all layers. Raises `BrokenReply`."""
    try:
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenReply(f"it does not say which experts it used: {error!r}") from error
    return reply.with_routes(found, shape, tokens)


def prompt_logprobs(meta: Mapping[str, Any]) -> list[float]:
    """Log-probs of the prompt's tokens after the first. Raises `BrokenReply`."""
    try:
        return logprobs_of([row[0] for row in meta["input_token_logprobs"][1:]])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"no log-probs of the prompt: {error!r}") from error

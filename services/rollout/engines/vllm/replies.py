"""Parsers of a vLLM server's features, load report and replies."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from services.rollout.engines.errors import BrokenReply
from services.rollout.engines.servers.interface import (
    AdapterLimits,
    ServerDescription,
    ServerLoad,
    ServerReply,
    Unfit,
    VersionName,
    Way,
    logprobs_of,
)
from troupe.mixtures import RoutingShape

# Paths without which nothing works, and what the server must be started with to have them.
_NEEDED: Final[Mapping[str, str]] = {
    "/inference/v1/generate": "--enable-scale-out",
    "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/pause": "VLLM_SERVER_DEV_MODE=1",
}
# The phases of a transfer from a trainer's devices.
_TRANSFER: Final = frozenset(
    {
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    }
)
# Allows a server to unpickle handles of tensors.
PICKLES: Final = "VLLM_ALLOW_INSECURE_SERIALIZATION"
# Log-probs after the temperature, under which tokens are drawn.
LOGPROBS: Final = "processed_logprobs"


@dataclass(frozen=True)
class VllmFeatures:
    """VllmFeatures of a server, read from its OpenAPI document.

    `version_call`: weights can be named. `adapters`: LoRA adapters can be loaded while it runs.
    `checksum`: it computes checksums of its weights. `memory`: it can release weights and cache.
    `transfer`: it takes weights from a trainer's devices, in four phases.
    """

    version_call: bool
    adapters: bool
    checksum: bool
    memory: bool
    transfer: bool

    @staticmethod
    def of(document: Mapping[str, Any]) -> VllmFeatures:
        """Read from an OpenAPI document. Raises `Unfit` if a path is absent that all depends on."""
        paths = document.get("paths", {})
        for path, option in _NEEDED.items():
            if path not in paths:
                raise Unfit(
                    f"it has no {path}",
                    f"Start it with {option}, or install a newer release.",
                )
        return VllmFeatures(
            version_call={"/update_weight_version", "/weight_info"} <= set(paths),
            adapters="/v1/load_lora_adapter" in paths,
            checksum="/weight_checker" in paths,
            transfer=set(paths) >= _TRANSFER,
            memory={"/sleep", "/wake_up", "/release_kv_cache_memory"} <= set(paths),
        )


def description_of(
    features: VllmFeatures, config: Mapping[str, Any], environment: Mapping[str, Any]
) -> ServerDescription:
    """Read `/server_info`: `vllm_config` and `vllm_env`. Raises `Unfit` and `BrokenReply`."""
    try:
        model, parallel = config["model_config"], config["parallel_config"]
        lora, device = config["lora_config"], config["device_config"]
        ranks = int(parallel["tensor_parallel_size"]) * int(parallel["pipeline_parallel_size"])
        if int(parallel["data_parallel_size"]) != 1:
            raise Unfit(
                "its weights cannot be updated: it runs data-parallel",
                "Run one server per replica, with --data-parallel-size 1.",
            )
        if model["logprobs_mode"] != LOGPROBS:
            raise Unfit(
                f"its log-probs are '{model['logprobs_mode']}', without the temperature",
                f"Start it with --logprobs-mode {LOGPROBS}.",
            )
        direct = _direct_ways(features, config, environment, ranks)
        return ServerDescription(
            ways=direct | {"directory"},
            keeps_cache=True,
            names_versions=features.version_call,
            frees_memory=features.memory and bool(model["enable_sleep_mode"]),
            takes_adapters=features.adapters,
            adapters=None if lora is None else _limits(lora),
            deterministic=bool(environment.get("VLLM_BATCH_INVARIANT")),
            routed_experts=bool(config["aux_output_config"]["enable_return_routed_experts"]),
            ranks=ranks,
            device=str(device["device"] or ""),
            context=int(model["max_model_len"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenReply(f"/server_info lacks what engines need: {error!r}") from error


def _direct_ways(
    features: VllmFeatures, config: Mapping[str, Any], environment: Mapping[str, Any], ranks: int
) -> frozenset[Way]:
    """The way from a trainer's devices that the server was started for, if any."""
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if not features.transfer or config["device_config"]["device"] != "cuda":
        return frozenset()
    if backend == "nccl":
        return frozenset({"broadcast"})
    # Handles of one GPU reach the rank on that GPU alone, and are a pickle.
    pickles = bool(environment.get(PICKLES))
    return frozenset({"ipc"}) if backend == "ipc" and ranks == 1 and pickles else frozenset()


def _limits(lora: Mapping[str, Any]) -> AdapterLimits:
    return AdapterLimits(
        int(lora["max_lora_rank"]), lora.get("target_modules") or (), int(lora["max_loras"])
    )


def load_of(metrics: str) -> ServerLoad:
    """Read `/metrics` in Prometheus' text format; 0 for absent values. Raises ValueError."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        if family.name.startswith("vllm:"):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    asked = found.get("vllm:prefix_cache_queries_total", 0.0)
    return ServerLoad(
        running=int(found.get("vllm:num_requests_running", 0)),
        waiting=int(found.get("vllm:num_requests_waiting", 0)),
        kv_usage=found.get("vllm:kv_cache_usage_perc", 0.0),
        cache_hit_rate=found.get("vllm:prefix_cache_hits_total", 0.0) / asked if asked else 0.0,
    )


def reply_of(reply: Mapping[str, Any]) -> ServerReply:
    """Read the answer to a generation. Raises `BrokenReply`."""
    try:
        (choice,) = reply["choices"]
        tokens = [int(token) for token in choice["token_ids"] or ()]
        rows = (choice["logprobs"] or {}).get("content") or ()
        if [row["token_id"] for row in rows] != tokens:
            raise BrokenReply(f"{len(tokens)} tokens, but log-probs of {len(rows)}, or of others")
        details = reply["usage"].get("prompt_tokens_details") or {}
        return ServerReply(
            tokens,
            logprobs_of(row["logprob"] for row in rows),
            aborted=choice["finish_reason"] == "abort",
            cached_tokens=int(details.get("cached_tokens") or 0),
            spans=[
                VersionName(str(span["version"]), int(span["start"]), int(span["end"]))
                for span in choice.get("weight_versions") or ()
            ],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenReply(f"not the answer to a generation: {error!r}") from error


def routes_of(
    reply: ServerReply, answer: Mapping[str, Any], shape: RoutingShape, tokens: int
) -> ServerReply:
    """`reply` with the experts that the first `tokens` - 1 of prompt and response were sent to,
    [tokens - 1, layers, k]: an `.npy` file in base64. Raises `BrokenReply`."""
    try:
        content = base64.b64decode(answer["choices"][0]["routed_experts"])
        found = np.load(io.BytesIO(content), allow_pickle=False).astype(np.int32)
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise BrokenReply(f"it does not say which experts it used: {error!r}") from error
    return reply.with_routes(found, shape, tokens)


def prompt_logprobs(reply: Mapping[str, Any], ids: Sequence[int]) -> list[float]:
    """Log-probs of `ids` after the first. Raises `BrokenReply`."""
    try:
        rows = reply["prompt_logprobs"][1:]
        return logprobs_of(
            row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenReply(f"no log-probs of the prompt: {error!r}") from error

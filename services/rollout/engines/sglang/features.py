"""What a server can do, and what it has to do, as it says itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Features:
    """What this server can do, read from its own OpenAPI document, never from its version.

    `retract`: pausing can put running turns back into the queue; otherwise they are aborted and
    continued by us. `tensors`: weights can be sent as tensors; `sessions`: such updates run between
    begin and end. `version_call`: the version can be set by itself, without aborting turns.
    `memory`: weights and key-value cache can be released. `adapters`: LoRA adapters can be loaded
    from a directory, `adapter_tensors`: from tensors. `loads`: path of the load
    report.
    """

    retract: bool
    pause: bool
    tensors: bool
    sessions: bool
    version_call: bool
    memory: bool
    adapters: bool
    adapter_tensors: bool
    loads: str | None

    @staticmethod
    def of(document: Mapping[str, Any]) -> Features:
        """Read from an OpenAPI document."""
        paths = document.get("paths", {})
        schemas = document.get("components", {}).get("schemas", {})
        pause = schemas.get("PauseGenerationReqInput", {}).get("properties", {})
        loads = next((path for path in ("/v1/loads", "/get_load") if path in paths), None)
        return Features(
            retract="/pause_generation" in paths and "mode" in pause,
            pause="/pause_generation" in paths,
            tensors="/update_weights_from_tensor" in paths,
            sessions="/begin_weight_update" in paths,
            version_call="/update_weight_version" in paths,
            memory={"/release_memory_occupation", "/resume_memory_occupation"} <= set(paths),
            adapters={"/load_lora_adapter", "/unload_lora_adapter"} <= set(paths),
            adapter_tensors="/load_lora_adapter_from_tensors" in paths,
            loads=loads,
        )


@dataclass(frozen=True)
class ServerLoad:
    """One server's load report, summed over its schedulers; releases leave out what they lack.

    `uncached_tokens`: prompt tokens of waiting requests that no cached prefix covers. `kv_usage`
    and `cache_hit_rate`: fractions, the largest and the mean of the schedulers.
    """

    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    tokens_per_second: float = 0.0
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0

    @staticmethod
    def of(reply: Mapping[str, Any]) -> ServerLoad:
        """Read `/v1/loads`, or `/get_load` of older releases. Raises AttributeError, TypeError or
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
            tokens_per_second=sum(float(e.get("gen_throughput") or 0) for e in entries),
            kv_usage=max((float(e.get("token_usage") or 0) for e in entries), default=0.0),
            cache_hit_rate=sum(rates) / len(rates) if rates else 0.0,
        )

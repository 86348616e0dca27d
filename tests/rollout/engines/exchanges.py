"""Requests to an SGLang server, one of each kind that Troupe sends, and what came back.

`python -m tests.rollout.engines.exchanges` plays them against a real server (see `real_server.py`)
and writes `recorded/`; the test double is held to that file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save_file

from tests.rollout.engines.models import VOCABULARY, make_model

RECORDED = Path(__file__).parent / "recorded" / "sglang-0.5.21.json"
# What Troupe looks at of the large documents.
_OPENAPI_PATHS = (
    "/pause_generation",
    "/update_weights_from_tensor",
    "/begin_weight_update",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/v1/loads",
    "/get_load",
)
MODEL_INFO = ("model_path", "model_type", "weight_version")
SERVER_INFO = (
    "version",
    "tp_size",
    "dp_size",
    "context_length",
    "max_running_requests",
    "max_total_num_tokens",
    "served_model_name",
    "skip_tokenizer_init",
    "enable_priority_scheduling",
    "enable_memory_saver",
    "enable_lora",
    "enable_deterministic_inference",
)


@dataclass(frozen=True)
class Exchange:
    """One request. In the `background` it runs while the next ones are made; `after`: the name of a
    background request that is waited for first."""

    name: str
    method: str
    path: str
    body: dict[str, Any] | None = None
    background: bool = False
    after: str | None = None


def exchanges(weights: Path, payload: str) -> Iterator[Exchange]:
    """All of them, in an order that leaves the server as it was but for its weights.

    `weights`: a model directory that the server sees; `payload`: its tensors as SGLang takes them.
    """

    def generate(
        name: str, background: bool = False, after: str | None = None, **changes: Any
    ) -> Exchange:
        sampling = {"max_new_tokens": 4, "temperature": 0.0, **changes.pop("sampling", {})}
        body = {
            "rid": f"x-{name}",
            "input_ids": [1, 2, 3],
            "return_logprob": True,
            "sampling_params": sampling,
            **changes,
        }
        return Exchange(name, "POST", "/generate", body, background, after)

    def post(name: str, path: str, body: dict[str, Any], after: str | None = None) -> Exchange:
        return Exchange(name, "POST", path, body, after=after)

    long = {"max_new_tokens": 200}
    tensors = {"serialized_named_tensors": [payload], "flush_cache": False}
    disk = {"load_format": "auto", "flush_cache": False, "weight_version": "2"}
    adapter = {"lora_name": "a", "lora_path": "/nonexistent"}
    memory = {"tags": ["cuda_graph", "kv_cache", "weights"]}
    yield Exchange("document", "GET", "/openapi.json")
    yield Exchange("model", "GET", "/model_info")
    yield Exchange("server", "GET", "/server_info")
    yield Exchange("health", "GET", "/health_generate")
    yield Exchange("load", "GET", "/v1/loads?include=core")
    yield Exchange("load of older releases", "GET", "/get_load")
    yield generate("to the length", logprob_start_len=0)
    yield generate("to a stop token", sampling={"stop_token_ids": list(range(VOCABULARY))})
    yield generate("no token", sampling={"max_new_tokens": 0})
    yield generate("too long", input_ids=[1] * 300)
    yield generate("unknown token's bias", sampling={"logit_bias": {str(1 << 40): 0.0}})
    yield generate("unknown adapter", lora_path="nobody")
    yield post("tokenize", "/tokenize", {"prompt": "a", "add_special_tokens": False})
    yield post("tensors outside", "/update_weights_from_tensor", tensors)
    yield post("begin", "/begin_weight_update", {"selector": "all"})
    yield post("begin twice", "/begin_weight_update", {"selector": "all"})
    yield post("tensors", "/update_weights_from_tensor", tensors)
    yield post("end", "/end_weight_update", {})
    yield post("end twice", "/end_weight_update", {})
    yield post("disk", "/update_weights_from_disk", {"model_path": str(weights), **disk})
    yield post("no disk", "/update_weights_from_disk", {"model_path": "/nonexistent", **disk})
    yield post("checksum", "/weights_checker", {"action": "checksum"})
    yield post("flush", "/flush_cache", {})
    yield generate("aborted", background=True, sampling=long)
    yield post("abort", "/abort_request", {"rid": "x-aborted"})
    yield post("abort of nobody", "/abort_request", {"rid": "nobody"}, after="aborted")
    yield generate("kept", background=True, sampling=long)
    yield post("pause", "/pause_generation", {"mode": "retract"})
    yield post("flush of a paused one", "/flush_cache", {})
    version = {"new_version": "3", "abort_all_requests": False}
    yield post("version", "/update_weight_version", version)
    yield post("continue", "/continue_generation", {})
    yield generate("busy", background=True, after="kept", sampling=long)
    yield post("flush of a busy one", "/flush_cache", {})
    yield generate("busy again", rid="x-busy")
    yield post("pause that aborts", "/pause_generation", {"mode": "abort"})
    yield post("continue again", "/continue_generation", {})
    yield post("flush at the end", "/flush_cache", {}, after="busy")
    yield post("release", "/release_memory_occupation", memory)
    yield post("resume", "/resume_memory_occupation", memory)
    yield post("adapter", "/load_lora_adapter", adapter)
    from_tensors = {
        "lora_name": "a",
        "config_dict": {"r": 1},
        "serialized_named_tensors": [payload],
    }
    yield post("adapter's tensors", "/load_lora_adapter_from_tensors", from_tensors)
    yield post("adapter away", "/unload_lora_adapter", {"lora_name": "a"})


async def play(url: str, directory: Path) -> dict[str, dict[str, Any]]:
    """`{"status", "body"}` by name of the exchange; `body` is JSON, or `{"text": ...}`."""
    model = make_model(1)
    weights = directory / "weights"
    model.save_pretrained(weights)
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, weights / "model.safetensors", metadata={"format": "pt"})
    payload = base64.b64encode(pickle.dumps(list(state.items()))).decode()
    outcomes: dict[str, dict[str, Any]] = {}
    running: dict[str, asyncio.Task[None]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

        async def ask(exchange: Exchange) -> None:
            answer = await http.request(exchange.method, exchange.path, json=exchange.body)
            outcomes[exchange.name] = {"status": answer.status_code, "body": _body(answer)}

        for exchange in exchanges(weights, payload):
            if exchange.after is not None:
                await running[exchange.after]
            if exchange.background:
                running[exchange.name] = asyncio.create_task(ask(exchange))
                await asyncio.sleep(0.1)
            else:
                await ask(exchange)
        await asyncio.gather(*running.values())
    return {name: _trimmed(name, outcome) for name, outcome in outcomes.items()}


def _body(answer: httpx.Response) -> Any:
    if "json" not in answer.headers.get("content-type", ""):
        return {"text": answer.text}
    return answer.json()


def _trimmed(name: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Remove unused fields and this machine's paths."""
    body = outcome["body"]
    if name == "server":
        body = {key: body[key] for key in SERVER_INFO if key in body}
    elif name == "model":
        body = {key: body[key] for key in MODEL_INFO if key in body}
    elif name == "document":
        schema = body["components"]["schemas"]["PauseGenerationReqInput"]["properties"]
        body = {
            "paths": {path: {} for path in _OPENAPI_PATHS if path in body["paths"]},
            "components": {
                "schemas": {"PauseGenerationReqInput": {"properties": {key: {} for key in schema}}}
            },
        }
    return {"status": outcome["status"], "body": _scrubbed(body)}


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner) for inner in value]
    return "/somewhere" if isinstance(value, str) and "/" in value and " " not in value else value


def _record() -> None:
    from tests.rollout.engines.real_server import running

    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as server:
        outcomes = asyncio.run(play(server.url, Path(directory)))
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    print(f"{len(outcomes)} exchanges in {RECORDED.name}", file=sys.stderr)


if __name__ == "__main__":
    _record()

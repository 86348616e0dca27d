"""A test double that speaks SGLang's HTTP surface over a tiny real model.

Held to the real server by tests/rollout/engines/test_sglang_contract.py, which runs the same
checks against both. What was recorded from 0.5.21 on a CPU and is imitated here: log-probs under
softmax(logits / temperature); a bias of an unknown token is refused with the range of the known
ones; a pause answers at once, new requests wait; a paused server fails its health probe and ignores
aborts of requests that it has not taken yet; an abort hands over the tokens so far; a second
request with a live id is refused; tensor updates are refused outside a session; the weights checker
needs CUDA; an id outside the vocabulary or a tensor of a wrong shape kills the server (here: the
connection).
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKEN_SECONDS = 0.002


class PauseGenerationReqInput(BaseModel):
    """Releases from 0.5.6 know modes; the name is what the client looks for."""

    mode: str = "abort"


@dataclass
class Faults:
    """What goes wrong, switched by tests."""

    never_answer: bool = False
    cut_reply: bool = False
    cut_connection: bool = False
    """Sends half of an answer and hangs up."""
    unhealthy: bool = False
    ignore_weights: bool = False
    """Accepts an update and keeps the old weights: every rival's worst bug."""
    refuse_update: bool = False
    blind: bool = False
    """Sees none of our files, as from within a container."""
    abort_everything: bool = False


@dataclass
class Call:
    """One request that the server holds."""

    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


class FakeSglang:
    """State of the double; `old` leaves out what releases before 0.5.6 do not have."""

    def __init__(self, config: dict[str, Any], *, old: bool = False) -> None:
        self.old = old
        self.faults = Faults()
        self.server: Running
        self.seen: list[str] = []
        self.version = "default"
        self.paused = False
        self.session = False
        self.calls: dict[str, Call] = {}
        self.bodies: list[dict[str, Any]] = []
        """What `/generate` was asked for."""
        self.info: dict[str, Any] = {
            "model_path": "m",
            "served_model_name": "m",
            "version": "0.5.21",
            "tp_size": 1,
            "dp_size": 1,
            "context_length": 256,
            "max_running_requests": 64,
            "skip_tokenizer_init": True,
            "enable_priority_scheduling": False,
            "enable_memory_saver": False,
            "enable_lora": None,
            "enable_deterministic_inference": False,
        }
        self.model_type = config["model_type"]
        self.vocabulary = config["vocab_size"]
        self.tokenizer: Callable[[str], list[int]] | None = None
        self.has_cuda = False
        """Its own checksums of its weights can be had."""
        self.released: set[str] = set()
        self.adapters: dict[str, dict[str, Any]] = {}
        torch.manual_seed(99)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        self._context = config["max_position_embeddings"]
        self._generator = torch.Generator().manual_seed(5)
        self.app = FastAPI()
        self._routes()

    def step(self, ids: list[int], sampling: dict[str, Any]) -> tuple[int, float]:
        """Draw one token after `ids`."""
        temperature = sampling["temperature"] or 1.0
        with torch.no_grad():
            logits = self._model(torch.tensor([ids]), use_cache=False).logits[0, -1] / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        if sampling["temperature"] == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._generator))
        return token, float(logprobs[token])

    async def generate(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        rid = body.get("rid") or uuid.uuid4().hex
        prompt = body["input_ids"]
        sampling = {"temperature": 1.0, "max_new_tokens": 128, **body["sampling_params"]}
        for token in sampling.get("logit_bias") or {}:
            if not 0 <= int(token) < self.vocabulary:
                return _refusal(
                    f"logit_bias must has keys in [0, {self.vocabulary - 1}], got {token}."
                )
        adapter = body.get("lora_path")
        if adapter is not None and not self.info["enable_lora"]:
            return _refusal(f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled.")
        if adapter is not None and adapter not in self.adapters:
            return _refusal(f"Got LoRA adapter that has never been loaded: {adapter}")
        if self.released:
            raise RuntimeError("a scheduler without its memory dies")
        if len(prompt) >= self._context:
            return _refusal(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self._context} tokens)."
            )
        if rid in self.calls:
            return _refusal(f"Duplicate request ID detected: {rid}")
        if self.faults.never_answer:
            await asyncio.sleep(3600)
        while self.paused:  # noqa: ASYNC110
            await asyncio.sleep(TOKEN_SECONDS)
        call = self.calls[rid] = Call()
        try:
            reason = await self._decode(call, prompt, sampling)
        finally:
            del self.calls[rid]
        finish: dict[str, Any] = {"type": reason}
        if reason == "abort":
            finish |= {"message": "Aborted", "status_code": None, "err_type": None}
        elif reason == "length":
            finish["length"] = sampling["max_new_tokens"]
        else:
            finish["matched"] = call.tokens[-1]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(call.tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(call.logprobs, call.tokens, strict=True)
            ],
        }
        if not self.old:
            none = [{"version": self.version, "start": 0, "end": 0}]
            meta["weight_versions"] = _spans(call.versions) or none
        meta["input_token_logprobs"] = []
        if body.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = self._prompt_logprobs(prompt)
        return JSONResponse({"output_ids": call.tokens, "meta_info": meta})

    async def _decode(self, call: Call, prompt: list[int], sampling: dict[str, Any]) -> str:
        while len(call.tokens) < sampling["max_new_tokens"]:
            await asyncio.sleep(TOKEN_SECONDS)
            while self.paused and not call.aborted:  # noqa: ASYNC110
                await asyncio.sleep(TOKEN_SECONDS)
            if call.aborted or self.faults.abort_everything:
                return "abort"
            token, logprob = self.step(prompt + call.tokens, sampling)
            call.tokens.append(token)
            call.logprobs.append(logprob)
            call.versions.append(self.version)
            if token in sampling.get("stop_token_ids", []):
                return "stop"
        return "length"

    def _prompt_logprobs(self, prompt: list[int]) -> list[list[Any]]:
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        table = torch.log_softmax(logits, dim=-1)
        rest = [[float(table[i, t]), t, None] for i, t in enumerate(prompt[1:])]
        return [[None, prompt[0], None], *rest]

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.faults.ignore_weights:
            return
        self._model.load_state_dict(tensors, strict=False)

    def _routes(self) -> None:
        app = self.app

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            self.seen.append(request.url.path)
            return await call_next(request)

        @app.get("/get_model_info" if self.old else "/model_info")
        async def model_info() -> dict[str, Any]:
            info = {"model_path": "m", "weight_version": self.version}
            return info if self.old else {**info, "model_type": self.model_type}

        @app.get("/get_server_info" if self.old else "/server_info")
        async def server_info() -> dict[str, Any]:
            self.info["max_total_num_tokens"] = 20000
            return self.info

        @app.get("/health_generate")
        async def health() -> Response:
            return Response(status_code=503 if self.paused or self.faults.unhealthy else 200)

        @app.post("/generate")
        async def generate(body: dict[str, Any]) -> Response:
            response = await self.generate(body)
            half = bytes(response.body[: len(response.body) // 2])
            if self.faults.cut_reply:
                return Response(half, response.status_code)
            if self.faults.cut_connection:
                length = {"content-length": str(len(response.body))}
                return Response(half, response.status_code, headers=length)
            return response

        @app.post("/abort_request")
        async def abort(body: dict[str, Any]) -> Response:
            for rid, call in self.calls.items():
                if body.get("abort_all") or rid == body["rid"]:
                    call.aborted = True
            return Response()

        @app.post("/flush_cache")
        async def flush() -> Response:
            busy = bool(self.calls) and not self.paused
            return Response("busy" if busy else "flushed", 400 if busy else 200)

        @app.post("/update_weights_from_disk")
        async def from_disk(body: dict[str, Any]) -> Response:
            path = Path(body["model_path"]) / "model.safetensors"
            hidden = self.faults.refuse_update or self.faults.blind
            if hidden or not path.exists():
                return _outcome(False, f"Failed to get weights iterator: {path}")
            self._load(load_file(path))
            if body.get("weight_version") is not None:
                self.version = body["weight_version"]
            return _outcome(True, "Succeeded to update model weights.")

        @app.post("/weights_checker")
        async def checker() -> Response:
            if not self.has_cuda:
                return _outcome(False, "Torch not compiled with CUDA enabled")
            total = sum(float(p.detach().double().abs().sum()) for p in self._model.parameters())
            return JSONResponse({"per_engine_checksum": [f"{total:.12g}"]})

        if not self.old:
            self._new_routes()

    def _new_routes(self) -> None:
        app = self.app

        @app.get("/v1/loads")
        async def loads() -> dict[str, Any]:
            running = 0 if self.paused else len(self.calls)
            waiting = len(self.calls) - running
            one = {
                "timestamp": time.time(),
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_waiting_uncached_tokens": 7 * waiting,
                "max_running_requests": 64,
                "token_usage": min(1.0, 0.125 * running),
                "gen_throughput": 0.0,
                "cache_hit_rate": 0.0,
            }
            return {"timestamp": "", "version": self.info["version"], "loads": [one]}

        @app.post("/tokenize", include_in_schema=False)
        async def tokenize(body: dict[str, Any]) -> Response:
            if self.tokenizer is None:
                message = "Internal server error during tokenization"
                body = {"object": "error", "message": message, "type": "InternalServerError"}
                return JSONResponse(body | {"param": None, "code": 500}, 500)
            tokens = self.tokenizer(body["prompt"])
            return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 256})

        @app.post("/release_memory_occupation")
        async def release(body: dict[str, Any]) -> None:
            assert not self.calls, "a busy scheduler dies of it"
            self.released |= set(body["tags"])

        @app.post("/resume_memory_occupation")
        async def resume_memory(body: dict[str, Any]) -> None:
            self.released -= set(body["tags"])

        self._adapter_routes()

        @app.post("/pause_generation")
        async def pause(body: PauseGenerationReqInput) -> dict[str, Any]:
            if body.mode == "abort":
                for call in self.calls.values():
                    call.aborted = True
            self.paused = True
            return {"status": "ok", "message": "Generation paused successfully."}

        @app.post("/continue_generation")
        async def resume() -> dict[str, Any]:
            self.paused = False
            return {"status": "ok", "message": "Generation continued successfully."}

        @app.post("/update_weight_version")
        async def set_version(body: dict[str, Any]) -> Response:
            if body.get("abort_all_requests", True):
                for call in self.calls.values():
                    call.aborted = True
            self.version = body["new_version"]
            return _outcome(True, f"Weight version updated to {self.version}")

        @app.post("/begin_weight_update")
        async def begin() -> Response:
            if self.session:
                return _outcome(False, "a weight-update session is already open")
            self.session = True
            return _outcome(True, "Success")

        @app.post("/end_weight_update")
        async def end() -> Response:
            was, self.session = self.session, False
            return _outcome(was, "Success" if was else "no weight-update session is open")

        @app.post("/update_weights_from_tensor")
        async def from_tensor(body: dict[str, Any] = Body()) -> Response:  # noqa: B008
            if not self.session:
                return _outcome(
                    False,
                    "update_weights_from_tensor must run between begin_weight_update() and "
                    "end_weight_update()",
                )
            if self.faults.refuse_update:
                return _outcome(False, "Failed to get weights")
            self._load(_received(body["serialized_named_tensors"][0]))
            if body.get("weight_version") is not None:
                self.version = body["weight_version"]
            return _outcome(True, "Success")

    def _adapter_routes(self) -> None:
        """LoRA, which needs CUDA: after 0.5.21's source. Without `--enable-lora`: as recorded."""
        app = self.app

        def outcome(error: str | None) -> Response:
            if not self.info["enable_lora"]:
                error = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
            loaded = None if error else dict.fromkeys(self.adapters, "path")
            body = {
                "rid": None,
                "http_worker_ipc": None,
                "success": error is None,
                "error_message": error,
                "loaded_adapters": loaded,
            }
            return JSONResponse(body, 400 if error else 200)

        def load(name: str, entry: dict[str, Any]) -> Response:
            if name in self.adapters:
                return outcome(f"LoRA adapter with name {name} already exists.")
            if self.info["enable_lora"]:
                self.adapters[name] = entry
            return outcome(None)

        @app.post("/load_lora_adapter")
        async def load_path(body: dict[str, Any]) -> Response:
            path = Path(body["lora_path"]) / "adapter_config.json"
            if not path.exists():
                return outcome(f"Failed to load LoRA adapter: no {path}")
            return load(body["lora_name"], {"path": body["lora_path"]})

        @app.post("/load_lora_adapter_from_tensors")
        async def load_tensors(body: dict[str, Any]) -> Response:
            tensors = _received(body["serialized_named_tensors"][0])
            return load(body["lora_name"], {"config": body["config_dict"], "tensors": tensors})

        @app.post("/unload_lora_adapter")
        async def unload(body: dict[str, Any]) -> Response:
            known = self.adapters.pop(body["lora_name"], None)
            return outcome(None if known else f"LoRA adapter {body['lora_name']} is not loaded.")


class Running:
    """A double being served on one loopback port, which it keeps across crashes."""

    def __init__(self, fake: FakeSglang) -> None:
        self._fake = fake
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    async def start(self) -> None:
        """Listen."""
        settings = uvicorn.Config(
            self._fake.app, port=self.port, log_level="critical", lifespan="off"
        )
        self._server = uvicorn.Server(settings)
        self._task = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(10):
            while not self._server.started:  # noqa: ASYNC110 - uvicorn offers no event
                await asyncio.sleep(0.01)

    async def crash(self) -> None:
        """Stop listening and cut every connection."""
        server, task = self._server, self._task
        if server is None or task is None:
            return
        self._server = self._task = None
        server.should_exit = server.force_exit = True
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await task


@asynccontextmanager
async def serve(fake: FakeSglang) -> AsyncIterator[str]:
    """Serve `fake` in this event loop; yields its URL. `fake.server` can crash and start again."""
    fake.server = Running(fake)
    await fake.server.start()
    try:
        yield f"http://127.0.0.1:{fake.server.port}"
    finally:
        await fake.server.crash()


def _refusal(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, 400)


def _outcome(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    return spans


def _received(payload: str) -> dict[str, torch.Tensor]:
    import base64
    import pickle

    # SGLang's own encoding of tensor updates; a test's own data.
    return dict(pickle.loads(base64.b64decode(payload)))

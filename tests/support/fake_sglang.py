"""A test double that speaks SGLang's HTTP surface over a tiny real model.

Held to the real server by tests/rollout/engines/test_sglang_contract.py, which runs the same
checks against both. What was recorded from 0.5.21 on a CPU and is imitated here: log-probs under
softmax(logits / temperature); a bias of an unknown token is refused with the range of the known
ones; a pause answers at once, new requests wait; a paused server fails its health probe and ignores
aborts of requests that it has not taken yet; an abort hands over the tokens so far; a second
request with a live id is refused; tensor updates are refused outside a session; the weights checker
needs CUDA; an id outside the vocabulary or a tensor of a wrong shape kills the server (here: the
connection). A request keeps the adapter that it began with; to unload one waits until its last
request has ended, and others are neither loaded nor unloaded meanwhile. Weights go in as the real
loader takes them: by the names of checkpoints, some or all; names that it does not know it skips
without a word.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.sglang_routes import add_routes
from tests.support.waiting import until
from troupe.checkpoints.format import CheckpointFormat, ModelArrangement
from troupe.mixtures import RecordedRoutes, Routers

TOKEN_SECONDS = 0.002


@dataclass
class Faults:
    """Faults, switched by tests."""

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
    not_finite: bool = False
    """Its weights compute NaN, which its JSON calls null."""
    queue: int = 0
    """Requests of others that wait in it: new ones wait behind them."""
    hangs: bool = False
    """Takes connections and answers nothing, as a process that is stopped."""


@dataclass
class Call:
    """One request that the server holds."""

    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    adapter: dict[str, Any] | None = None


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
        self.buckets_left = -1
        """A fault: after so many buckets of weights it refuses the next; negative: never."""
        self.buckets_to_death = -1
        """A fault: after so many buckets by broadcast its process ends at the next; negative:
        never."""
        self.calls: dict[str, Call] = {}
        self.bodies: list[dict[str, Any]] = []
        """The bodies of requests to `/generate`."""
        self.modes: list[str] = []
        """The modes of its pauses."""
        self.read: list[int] = []
        """Inodes of the files that it loaded weights from."""
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
            "enable_return_routed_experts": False,
        }
        self.model_type = config["model_type"]
        self.vocabulary = config["vocab_size"]
        self.tokenizer: Callable[[str], list[int]] | None = None
        self.has_cuda = False
        """Its own checksums of its weights can be had."""
        self.skips: set[str] = set()
        """A fault: names of checkpoints that it does not know either."""
        self.released: set[str] = set()
        self.adapters: dict[str, dict[str, Any]] = {}
        self.alters: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """A fault: what becomes of an adapter's configuration on its way in."""
        self.mistaken: dict[str, torch.Tensor] | None = None
        """A fault: the weights that it uses in place of every adapter that is loaded."""
        self.refuses: set[str] = set()
        """A fault: it refuses requests whose ids begin so."""
        torch.manual_seed(99)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        self._format = CheckpointFormat(self._model, torch.float32)
        held = self._format.of(self._model.state_dict())
        # Its tensors in the form of a checkpoint: experts one by one.
        self._held = {name: tensor.clone() for name, tensor in held.items()}
        self._context = config["max_position_embeddings"]
        self._generator = torch.Generator().manual_seed(5)
        self.app = FastAPI()
        add_routes(self)

    def step(
        self, ids: list[int], sampling: dict[str, Any], adapter: dict[str, Any] | None = None
    ) -> tuple[int, float]:
        """Draw one token after `ids`."""
        temperature = sampling["temperature"] or 1.0
        with torch.no_grad():
            logits = (
                self._with(adapter)(torch.tensor([ids]), use_cache=False).logits[0, -1]
                / temperature
            )
        logprobs = torch.log_softmax(logits, dim=-1)
        if sampling["temperature"] == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._generator))
        return token, float(logprobs[token])

    def _with(self, entry: dict[str, Any] | None) -> Any:
        """The model that a request is computed with: PEFT's layers for an adapter from tensors."""
        if not entry or not any(".lora_B." in name for name in entry.get("tensors", {})):
            return self._model
        if "model" not in entry:
            from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

            told = self.alters(entry["config"]) if self.alters else entry["config"]
            config = {n: told[n] for n in ("r", "lora_alpha", "target_modules")}
            entry["model"] = get_peft_model(copy.deepcopy(self._model), LoraConfig(**config))
            set_peft_model_state_dict(entry["model"], entry["tensors"])
        return entry["model"].eval()

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
        if any(rid.startswith(f"{one}#") for one in self.refuses):
            return _refusal("it will not")
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
        loaded = self.adapters[adapter] if adapter is not None else None
        while self.paused or self.faults.queue:  # noqa: ASYNC110
            await asyncio.sleep(TOKEN_SECONDS)
        call = self.calls[rid] = Call(adapter=loaded)
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
                [None if self.faults.not_finite else logprob, token, None]
                for logprob, token in zip(call.logprobs, call.tokens, strict=True)
            ],
        }
        if not self.old:
            none = [{"version": self.version, "start": 0, "end": 0}]
            meta["weight_versions"] = _spans(call.versions) or none
        if self.info["enable_return_routed_experts"] and body.get("return_routed_experts"):
            meta["routed_experts"] = self._routes([*prompt, *call.tokens[:-1]])
        meta["input_token_logprobs"] = []
        if (start := body.get("logprob_start_len", -1)) >= 0:
            # Of the first of them none is reported, wherever that is.
            rows = self._prompt_logprobs(prompt, loaded)[start:]
            meta["input_token_logprobs"] = [[None, *rows[0][1:]], *rows[1:]]
        return JSONResponse({"output_ids": call.tokens, "meta_info": meta})

    def _routes(self, ids: list[int]) -> str:
        """Return the routes of all layers, int32 in base64, from one pass over all tokens."""
        routers = Routers.of(self._model)
        assert routers is not None
        recorded = RecordedRoutes(routers.shape, {})
        with torch.no_grad(), routers.passing(recorded):
            self._model(torch.tensor([ids]), use_cache=False)
        return base64.b64encode(recorded.compact().astype(np.int32).tobytes()).decode()

    async def _decode(self, call: Call, prompt: list[int], sampling: dict[str, Any]) -> str:
        while len(call.tokens) < sampling["max_new_tokens"]:
            await asyncio.sleep(TOKEN_SECONDS)
            while self.paused and not call.aborted:  # noqa: ASYNC110
                await asyncio.sleep(TOKEN_SECONDS)
            if call.aborted or self.faults.abort_everything:
                return "abort"
            token, logprob = self.step(prompt + call.tokens, sampling, call.adapter)
            call.tokens.append(token)
            call.logprobs.append(logprob)
            call.versions.append(self.version)
            if token in sampling.get("stop_token_ids", []):
                return "stop"
        return "length"

    def _prompt_logprobs(
        self, prompt: list[int], adapter: dict[str, Any] | None
    ) -> list[list[Any]]:
        with torch.no_grad():
            logits = self._with(adapter)(torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        table = torch.log_softmax(logits, dim=-1)
        rest = [[float(table[i, t]), t, None] for i, t in enumerate(prompt[1:])]
        return [[None, prompt[0], None], *rest]

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take new weights."""
        if self.faults.ignore_weights:
            return
        for name, tensor in tensors.items():
            if name in self.skips or name not in self._held:
                continue
            if tensor.shape != self._held[name].shape:
                raise RuntimeError(f"a scheduler that is given {list(tensor.shape)} dies: {name}")
            self._held[name] = tensor.to(torch.float32).clone()
        found = ModelArrangement.of(self._model, self._held).arranged(self._held)
        self._model.load_state_dict(dict(found), strict=False)
        for entry in self.adapters.values():
            entry.pop("model", None)

    def forget(self) -> None:
        """Be a server that was started anew: other weights, no adapters, no names."""
        self.adapters.clear()
        self.version, self.paused, self.session = "default", False, False
        self.load({name: torch.zeros_like(tensor) for name, tensor in self._held.items()})

    def checksum(self) -> float:
        """One number of all weights."""
        return sum(float(p.detach().double().abs().sum()) for p in self._model.parameters())


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
        await until(lambda: self._server.started)

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


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    return spans

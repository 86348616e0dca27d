"""`SglangServer`: SGLang's HTTP API and command line, as Troupe uses them.

Read from releases 0.4.6 to 0.5.23 and tested against a real 0.5.21 (the slow test). What a server
can do is read from its own OpenAPI document, never from its version number.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson
import torch

from services.rollout.engines.errors import BrokenReply, Refused, ServerGone
from services.rollout.engines.servers.http import CONTROL_SECONDS, HttpServer, Json, seconds_for
from services.rollout.engines.servers.interface import (
    AdapterLimits,
    AdapterNeeds,
    Launch,
    LaunchFeature,
    RunningTurns,
    ServerDescription,
    ServerLoad,
    ServerReply,
    Unfit,
    Way,
)
from services.rollout.engines.sglang.replies import (
    Features,
    load_of,
    prompt_logprobs,
    reply_of,
    routes_of,
)
from services.rollout.engines.turns import EngineTurn
from troupe.checkpoints.adapters import AdapterContent
from troupe.mixtures import RoutingShape
from troupe.transfer.formats import sglang as encoding
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.workflow.token_ids import TokenIds

# Kernels whose results do not depend on the batch, and sampling by each request's own seed.
DETERMINISTIC: Final = "--enable-deterministic-inference"
# First release whose CUDA graphs have options by phase, decoding and prefill.
_GRAPHS_BY_PHASE: Final = (0, 5, 14)
# CUDA graphs go and come with the cache: both are for generating only. A server that was not
# started to release graphs ignores it.
_GRAPHS: Final = "cuda_graph"
# Experts that tokens were sent to are kept, for turns that ask for them.
ROUTED_EXPERTS: Final = "--enable-return-routed-experts"
# `/health_generate` waits a second before it looks. Shorter than the timeout of callers of `check`,
# so that a missed probe is counted.
HEALTH_SECONDS: Final = 15.0
# For the one token of `probe`; a busy server answers a little later.
PROBE_SECONDS: Final = 10.0
# An id outside every vocabulary, and the part of a server's refusal that has the largest id.
_NO_TOKEN: Final = 1 << 40
_VOCABULARY: Final = re.compile(r"\[0, (\d+)\]")
# Largest seed that servers take.
_INT64: Final = (1 << 63) - 1
# Sampling parameters of a scoring request: nothing is drawn.
_NO_TOKENS: Final[Json] = {"max_new_tokens": 0, "temperature": 1.0}
_PAUSES: Final[Mapping[RunningTurns, str]] = {
    "requeue": "retract",
    "abort": "abort",
    "keep": "in_place",
}


class SglangServer(HttpServer):
    """HTTP client and command line of an SGLang server."""

    product: ClassVar[str] = "SGLang"
    oldest: ClassVar[str] = "0.4.6"
    options: ClassVar[Mapping[LaunchFeature, str]] = {
        "deterministic": f"{DETERMINISTIC} (releases from 0.5.3)",
        "routed_experts": f"{ROUTED_EXPERTS} (releases that have it)",
        "memory": "--enable-memory-saver",
        "adapters": "a release that has /load_lora_adapter_from_tensors",
        "slots": "--max-loras-per-batch (and --max-loaded-loras)",
    }
    name_option: ClassVar[str] = "--served-model-name"
    bucket_format: ClassVar[str] = "sglang"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        # None until `describe`: then calls are made that older releases refuse.
        self._features: Features | None = None
        self._ranks = 1

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        """See `InferenceServer.command`.

        Random weights (`dummy`): the engine is STALE until the first update in any case. No
        tokenizer: token ids travel end to end.
        """
        engine, model = launch.spec.engine, launch.spec.language_model
        return [
            launch.interpreter,
            "-m",
            "sglang.launch_server",
            *("--model-path", launch.source),
            *(["--revision", model.revision] if model.revision else []),
            *("--host", "127.0.0.1"),
            *("--port", str(launch.port)),
            *("--dtype", model.weight_dtype),
            *("--load-format", "dummy"),
            *("--context-length", str(launch.max_context)),
            *("--max-running-requests", str(engine.running_limit)),
            *cls._graphs(launch),
            *(["--tp-size", str(engine.tensor_parallel)] if engine.tensor_parallel > 1 else []),
            "--skip-tokenizer-init",
            *([cls.name_option, launch.name] if launch.name else []),
            *([DETERMINISTIC] if launch.deterministic else []),
            *(["--enable-memory-saver"] if launch.memory else []),
            *([ROUTED_EXPERTS] if launch.routed_experts else []),
            *([] if launch.adapters is None else cls.adapter_arguments(launch.adapters)),
            *launch.extra_arguments,
        ]

    @classmethod
    def variables(cls, launch: Launch) -> Mapping[str, str]:
        """See `InferenceServer.variables`."""
        # Else graphs, with all that a batch of the largest size computes, stay on a sleeping
        # server's device (0.5.21: runner_backend/full_cuda_graph_backend.py).
        return {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"} if cls._sleeps(launch) else {}

    @classmethod
    def _graphs(cls, launch: Launch) -> list[str]:
        """Arguments about CUDA graphs: for batches up to the engine's limit. By default,
        graphs of small GPUs end at 8 to 48 turns; larger batches launch kernel by kernel."""
        if not launch.gpu or launch.release < _GRAPHS_BY_PHASE:
            return []
        most = ["--cuda-graph-max-bs-decode", str(launch.spec.engine.running_limit)]
        # The prefill graphs of GPUs refuse to be released (breakable_cuda_graph_backend.py).
        return most + (["--cuda-graph-backend-prefill", "disabled"] if cls._sleeps(launch) else [])

    @staticmethod
    def _sleeps(launch: Launch) -> bool:
        """Whether the server also releases its CUDA graphs when it sleeps."""
        return launch.memory and launch.gpu and launch.release >= _GRAPHS_BY_PHASE

    @classmethod
    def adapter_arguments(cls, needs: AdapterNeeds) -> list[str]:
        """See `InferenceServer.adapter_arguments`. The base has a place of a batch, too."""
        return [
            "--enable-lora",
            *("--max-lora-rank", str(needs.rank)),
            *("--lora-target-modules", *needs.modules),
            *("--max-loras-per-batch", str(needs.per_batch)),
        ]

    async def describe(self) -> ServerDescription:
        """See `InferenceServer.describe`."""
        try:
            features = Features.of(await self._json("GET", "/openapi.json"))
        except Refused:  # served without its documentation: assume the oldest
            features = Features.of({})
        info, model = await self._server_info(), await self._model_info()
        if info.get("dp_size", 1) != 1:
            raise Unfit(
                "its weights cannot be updated: it runs data-parallel",
                "Run one server per replica, with --dp-size 1.",
            )
        self._features, self._ranks = features, int(info.get("tp_size") or 1)
        context = info.get("context_length")
        possible: dict[Way, bool] = {
            "directory": True,
            "tensors": features.tensors,
            "ipc": features.buckets,
            "broadcast": features.groups,
        }
        return ServerDescription(
            ways=frozenset(way for way, able in possible.items() if able),
            pauses=features.pause,
            keeps_cache=features.in_place,
            names_versions=features.version_call,
            frees_memory=features.memory and bool(info.get("enable_memory_saver")),
            takes_adapters=features.adapter_tensors,
            adapters=_adapter_limits(info),
            deterministic=bool(info.get("enable_deterministic_inference")),
            routed_experts=bool(info.get("enable_return_routed_experts")),
            ranks=self._ranks,
            device=str(info.get("device") or ""),
            context=int(context) if context else None,
            model_type=model.get("model_type"),
            # Releases that cannot retract may not look at the ids of a bias before they use them.
            vocabulary=await self._vocabulary() if features.retract else None,
        )

    async def alive(self) -> bool:
        """See `InferenceServer.alive`."""
        try:
            await self._model_info()
        except (ServerGone, BrokenReply, Refused):
            return False
        return True

    async def healthy(self) -> bool:
        """See `InferenceServer.healthy`. Takes a second."""
        try:
            await self._send("GET", "/health_generate", seconds=HEALTH_SECONDS)
        except (ServerGone, BrokenReply, Refused):
            return False
        return True

    async def probe(self) -> bool:
        """See `InferenceServer.probe`: the health page may answer without a token."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            reply = await self._json("POST", "/generate", body, seconds=PROBE_SECONDS)
        except (ServerGone, BrokenReply, Refused):
            return False
        return len(reply.get("output_ids") or []) == 1

    async def load(self) -> ServerLoad:
        """See `InferenceServer.load`."""
        path = self._features.loads if self._features is not None else None
        if path is None:
            return ServerLoad()
        reply = await self._json("GET", path, params={"include": "core"})
        try:
            return load_of(reply)
        except (AttributeError, TypeError, ValueError) as error:
            raise BrokenReply(f"{path} of {self.url} answered no load report") from error

    async def served_name(self) -> str | None:
        """See `InferenceServer.served_name`."""
        name = (await self._server_info()).get("served_model_name")
        return None if name is None else str(name)

    async def tokenize(self, text: str) -> list[int] | None:
        """See `InferenceServer.tokenize`. The call is in no release's document."""
        try:
            reply = await self._json(
                "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}
            )
        except Refused:
            return None
        tokens = reply.get("tokens")
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    async def generate(
        self,
        turn: EngineTurn,
        *,
        adapter: str | None = None,
        routing: RoutingShape | None = None,
        cache_key: str | None = None,
    ) -> ServerReply:
        """See `InferenceServer.generate`."""
        prompt = turn.prompt_ids + turn.token_ids if turn.token_ids else turn.prompt_ids
        meta = await self.request(
            turn.key,
            prompt,
            sampling_of(turn),
            adapter=adapter,
            routed_experts=routing is not None,
            cache_key=cache_key,
        )
        reply = reply_of(meta)
        if routing is None or not reply.token_ids:
            return reply
        return routes_of(reply, meta, routing, len(prompt) + len(reply.token_ids))

    async def score(
        self,
        key: str,
        ids: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        cache_key: str | None = None,
    ) -> list[float]:
        """See `InferenceServer.score`."""
        meta = await self.request(
            key, ids, _NO_TOKENS, logprobs_from=start, adapter=adapter, cache_key=cache_key
        )
        found = prompt_logprobs(meta)
        if len(found) != len(ids) - start - 1:
            raise BrokenReply(f"{len(found)} log-probs for {len(ids) - start - 1} tokens")
        return found

    async def request(
        self,
        rid: str,
        input_ids: Sequence[int],
        sampling: Json,
        *,
        logprobs_from: int | None = None,
        adapter: str | None = None,
        routed_experts: bool = False,
        cache_key: str | None = None,
    ) -> Json:
        """The `meta_info` that `/generate` answers. No time limit of its own: the caller's deadline
        cancels. `logprobs_from`: also log-probs of the prompt's tokens after this position."""
        body: Json = {
            "rid": rid,
            "input_ids": orjson.Fragment(TokenIds.of(input_ids).json),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if routed_experts:  # releases that do not know the field refuse it
            body["return_routed_experts"] = True
        if logprobs_from is not None:
            body["logprob_start_len"] = logprobs_from
        if adapter is not None:
            body["lora_path"] = adapter
        if cache_key is not None:
            body["extra_key"] = cache_key
        reply = await self._json("POST", "/generate", body, seconds=None, reuse=True)
        meta = reply.get("meta_info")
        if not isinstance(meta, dict) or "finish_reason" not in meta:
            raise BrokenReply(f"/generate of {self.url} answered without meta_info")
        return meta

    async def abort(self, key: str) -> None:
        """See `InferenceServer.abort`."""
        await self._send("POST", "/abort_request", {"rid": key})

    async def pause(self, turns: RunningTurns) -> bool:
        """See `InferenceServer.pause`."""
        features = self._features
        if features is not None and features.retract:
            await self._send("POST", "/pause_generation", {"mode": _PAUSES[turns]})
            return turns == "requeue"
        if features is not None and features.pause:
            await self._send("POST", "/pause_generation", {})
        # Aborted turns are sent again, with their tokens so far, when the pause ends.
        await self._send("POST", "/abort_request", {"rid": "", "abort_all": True})
        return False

    async def resume(self) -> None:
        """See `InferenceServer.resume`."""
        if self._features is None or self._features.pause:
            await self._send("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """See `InferenceServer.flush_cache`."""
        await self._send("POST", "/flush_cache", {})

    async def version(self) -> str | None:
        """See `InferenceServer.version`."""
        name = (await self._model_info()).get("weight_version")
        return None if name is None else str(name)

    async def set_version(self, name: str) -> None:
        """See `InferenceServer.set_version`. The default would abort turns."""
        body = {"new_version": name, "abort_all_requests": False}
        await self._acknowledged("/update_weight_version", body)

    async def weights_digest(self, num_bytes: int) -> str | None:
        """See `InferenceServer.weights_digest`. 0.5.21 needs CUDA for it and answers 400 on a
        CPU."""
        try:
            reply = await self._json(
                "POST", "/weights_checker", {"action": "checksum"}, seconds=seconds_for(num_bytes)
            )
        except Refused:
            return None
        digest = reply.get("per_engine_checksum") or reply.get("ranks")
        return None if digest is None else str(digest)

    async def begin_update(self) -> None:
        """Open a session for tensor updates, which releases from 0.5.21 want."""
        if self._features is None or self._features.sessions:
            await self._acknowledged("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        """Close the session."""
        if self._features is None or self._features.sessions:
            await self._acknowledged("/end_weight_update", {})

    async def load_directory(self, path: str, name: str, num_bytes: int, *, flush: bool) -> None:
        """See `InferenceServer.load_directory`."""
        await self._acknowledged(
            "/update_weights_from_disk",
            {
                "model_path": path,
                # The server may have been launched with `dummy`, which it would use again.
                "load_format": "auto",
                "flush_cache": flush,
                "weight_version": name,
            },
            seconds_for(num_bytes),
        )

    async def load_tensors(
        self, tensors: Sequence[tuple[str, torch.Tensor]], name: str | None, *, shared: bool
    ) -> None:
        """See `InferenceServer.load_tensors`."""
        payloads = await asyncio.to_thread(encoding.payloads, tensors, self._ranks, shared=shared)
        body: Json = {"serialized_named_tensors": payloads, "flush_cache": False}
        if name is not None:
            body["weight_version"] = name
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        await self._acknowledged("/update_weights_from_tensor", body, seconds_for(num_bytes))

    async def join_group(self, group: trainer_pb.UpdateGroup) -> None:
        """See `InferenceServer.join_group`."""
        await self._acknowledged(
            "/init_weights_update_group",
            {
                "master_address": group.host,
                "master_port": group.port,
                "rank_offset": group.rank_offset,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.backend,
            },
        )

    async def leave_group(self, name: str) -> None:
        """See `InferenceServer.leave_group`."""
        await self._acknowledged("/destroy_weights_update_group", {"group_name": name})

    async def load_handles(self, bucket: trainer_pb.WeightBucket, num_bytes: int) -> None:
        """See `InferenceServer.load_handles`."""
        body = {
            "serialized_named_tensors": [encoding.as_text(one) for one in bucket.handles],
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        await self._acknowledged("/update_weights_from_tensor", body, seconds_for(num_bytes))

    async def load_broadcast(
        self, group: str, bucket: trainer_pb.WeightBucket, num_bytes: int
    ) -> None:
        """See `InferenceServer.load_broadcast`."""
        await self._acknowledged(
            "/update_weights_from_distributed",
            {
                "names": [tensor.name for tensor in bucket.tensors],
                "dtypes": [bucket.dtype] * len(bucket.tensors),
                "shapes": [list(tensor.shape) for tensor in bucket.tensors],
                "group_name": group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            },
            seconds_for(num_bytes),
        )

    async def load_adapter(self, name: str, content: AdapterContent, *, shared: bool) -> None:
        """See `InferenceServer.load_adapter`."""
        tensors = dict(content.tensors)
        payloads = await asyncio.to_thread(encoding.payloads, tensors, self._ranks, shared=shared)
        await self._acknowledged(
            "/load_lora_adapter_from_tensors",
            {
                "lora_name": name,
                "config_dict": content.peft_config(),
                "serialized_named_tensors": payloads,
            },
        )

    async def unload_adapter(self, name: str) -> None:
        """See `InferenceServer.unload_adapter`."""
        await self._acknowledged("/unload_lora_adapter", {"lora_name": name})

    async def release_memory(self, tags: Collection[str]) -> None:
        """See `InferenceServer.release_memory`. It kills a busy scheduler."""
        await self._send("POST", "/release_memory_occupation", {"tags": _with_graphs(tags)})

    async def resume_memory(self, tags: Collection[str]) -> None:
        """See `InferenceServer.resume_memory`."""
        await self._send("POST", "/resume_memory_occupation", {"tags": _with_graphs(tags)})

    async def _model_info(self) -> Json:
        """Model path and type, and the current `weight_version`."""
        return await self._first_of("/model_info", "/get_model_info")

    async def _server_info(self) -> Json:
        """The server's arguments and limits: `tp_size`, `dp_size`, `max_req_input_len`, ..."""
        return await self._first_of("/server_info", "/get_server_info")

    async def _vocabulary(self) -> int | None:
        """Size of the server's vocabulary, from its refusal of an id outside; None where it does
        not say. Nothing is generated: the bias of an unknown token is refused beforehand."""
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(_NO_TOKEN): 0.0}},
        }
        try:
            await self._json("POST", "/generate", body, seconds=PROBE_SECONDS)
        except Refused as error:
            found = _VOCABULARY.search(error.message)
            return int(found[1]) + 1 if found and error.status == 400 else None
        return None

    async def _first_of(self, *paths: str) -> Json:
        """GET the first path that the server knows: newer releases rename them."""
        for path in paths[:-1]:
            try:
                return await self._json("GET", path)
            except Refused as error:
                if error.status != 404:
                    raise
        return await self._json("GET", paths[-1])

    async def _acknowledged(self, path: str, body: Json, seconds: float = CONTROL_SECONDS) -> None:
        reply = await self._json("POST", path, body, seconds=seconds)
        if reply.get("success") is False:
            raise Refused(path, 200, str(reply.get("message") or reply.get("error_message")))


def sampling_of(turn: EngineTurn) -> dict[str, Any]:
    """Sampling parameters for the rest of `turn`. All are given: some defaults are traps.

    Servers honour the seed when launched with `--enable-deterministic-inference`.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": turn.remaining,
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "top_k": turn.sampling.top_k if turn.sampling.top_k > 0 else -1,
        "stop_token_ids": sorted(turn.stop_ids),
        "skip_special_tokens": False,
    }
    if turn.sampling.seed is not None:  # releases that do not know the field refuse it
        sampling["sampling_seed"] = turn.seed & _INT64
    return sampling


def _with_graphs(tags: Collection[str]) -> list[str]:
    return sorted({*tags, _GRAPHS} if "kv_cache" in tags else tags)


def _adapter_limits(info: Mapping[str, Any]) -> AdapterLimits | None:
    if not info.get("enable_lora"):
        return None
    rank, modules = info.get("max_lora_rank"), info.get("lora_target_modules") or ()
    batch, loaded = info.get("max_loras_per_batch"), info.get("max_loaded_loras")
    # One of a batch is none, the base. Of loaded ones beyond a limit it drops the oldest.
    slots = [int(batch) - 1] if batch is not None else []
    slots += [int(loaded)] if loaded is not None else []
    return AdapterLimits(
        None if rank is None else int(rank),
        () if "all" in modules else modules,
        min(slots, default=None),
    )

"""`VllmServer`: vLLM's HTTP API and command line, as Troupe uses them.

Read from release 0.32.0 and tested against a real one on a CPU (the slow test). What a server can
do is read from its own OpenAPI document and `/server_info`, never from its version number.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson

from services.rollout.engines.errors import BrokenReply, Refused, ServerGone
from services.rollout.engines.servers.http import CONTROL_SECONDS, HttpServer, Json, seconds_for
from services.rollout.engines.servers.interface import (
    AdapterNeeds,
    Launch,
    LaunchFeature,
    RunningTurns,
    ServerDescription,
    ServerLoad,
    ServerReply,
)
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.vllm.replies import (
    LOGPROBS,
    PICKLES,
    VllmFeatures,
    description_of,
    load_of,
    prompt_logprobs,
    reply_of,
    routes_of,
)
from troupe.checkpoints.adapters import AdapterContent
from troupe.disks import Scratch
from troupe.mixtures import RoutingShape
from troupe.transfer.formats import vllm as encoding
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.workflow.token_ids import TokenIds

# For the one token of `probe`; a busy server answers a little later.
PROBE_SECONDS: Final = 10.0
ROUTED_EXPERTS: Final = "--enable-return-routed-experts"
# Without it a server has no calls that load and unload adapters.
RUNTIME_ADAPTERS: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# How it takes weights from a trainer's devices.
TRANSFER: Final = "--weight-transfer-config"
_GENERATE: Final = "/inference/v1/generate"
# `/abort_requests` wants the id that the engine knows.
_KEY: Final = "generate-tokens-{}"
# Ranks of adapters that servers can be started for.
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_INT63: Final = (1 << 63) - 1
# Odd: turns that go on draw by other seeds than they began with.
_SEED_STEP: Final = 0x5851F42D4C957F2D
# vLLM, which recomputes nothing when weights change under a running turn, cannot requeue it.
_PAUSES: Final[Mapping[RunningTurns, str]] = {"requeue": "abort", "abort": "abort", "keep": "keep"}


class VllmServer(HttpServer):
    """HTTP client and command line of a vLLM server.

    A failed load of weights ends the server's engine; it then answers nothing, and is launched
    anew.
    """

    product: ClassVar[str] = "vLLM"
    oldest: ClassVar[str] = "0.32.0"
    options: ClassVar[Mapping[LaunchFeature, str]] = {
        "deterministic": "VLLM_BATCH_INVARIANT=1 in its environment",
        "routed_experts": ROUTED_EXPERTS,
        "memory": "--enable-sleep-mode",
        "adapters": f"{RUNTIME_ADAPTERS}=1 in its environment",
        "slots": "--max-loras",
    }
    name_option: ClassVar[str] = "--served-model-name"
    bucket_format: ClassVar[str] = "vllm"
    group_packages: ClassVar[Collection[str]] = ("NCCL",)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._features: VllmFeatures | None = None
        self._model: str | None = None
        self._by_handles = False
        # Directories of loaded adapters: the server reads one again after it has evicted it.
        self._adapters: dict[str, Scratch] = {}

    async def close(self) -> None:
        """See `InferenceServer.close`. Removes the files of adapters, too."""
        await super().close()
        for name in list(self._adapters):
            self._forget(name)

    @classmethod
    def command(cls, launch: Launch) -> list[str]:
        """See `InferenceServer.command`."""
        engine, model = launch.spec.engine, launch.spec.language_model
        return [
            launch.interpreter,
            *("-m", "vllm.entrypoints.cli.main", "serve", launch.source),
            *(["--revision", model.revision] if model.revision else []),
            *("--host", "127.0.0.1"),
            *("--port", str(launch.port)),
            *("--dtype", model.weight_dtype),
            *("--load-format", "dummy"),
            *("--max-model-len", str(launch.max_context)),
            *("--max-num-seqs", str(engine.running_limit)),
            *(
                ["--tensor-parallel-size", str(engine.tensor_parallel)]
                if engine.tensor_parallel > 1
                else []
            ),
            "--skip-tokenizer-init",
            "--enable-scale-out",
            *("--logprobs-mode", LOGPROBS),
            # Else the checkpoint's own sampling parameters replace those that a request leaves out.
            *("--generation-config", "vllm"),
            "--enable-prompt-tokens-details",
            *([cls.name_option, launch.name] if launch.name else []),
            *(["--enable-sleep-mode"] if launch.memory else []),
            *([ROUTED_EXPERTS] if launch.routed_experts else []),
            *([] if launch.adapters is None else cls.adapter_arguments(launch.adapters)),
            *cls._transfer_arguments(launch),
            *launch.extra_arguments,
        ]

    @classmethod
    def variables(cls, launch: Launch) -> Mapping[str, str]:
        """See `InferenceServer.variables`. Calls for pauses and weights are there in what vLLM
        calls development mode alone; launched servers listen on loopback only."""
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({} if launch.adapters is None else {RUNTIME_ADAPTERS: "1"}),
            **({"VLLM_BATCH_INVARIANT": "1"} if launch.deterministic else {}),
            **({PICKLES: "1"} if cls._transfer(launch) == "ipc" else {}),
            # Else its threads are bound to the first cores, as every other server's are.
            **({} if launch.gpu else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        }

    @classmethod
    def _transfer_arguments(cls, launch: Launch) -> list[str]:
        backend = cls._transfer(launch)
        return [] if backend is None else [TRANSFER, f'{{"backend": "{backend}"}}']

    @staticmethod
    def _transfer(launch: Launch) -> str | None:
        """The one way from a trainer's devices that the server is started for: on the trainer's own
        GPU by handles, which reach one rank; between GPUs by NCCL."""
        engine = launch.spec.engine
        if not launch.gpu or launch.adapters is not None:
            return None
        if engine.update == "auto":
            if not launch.spec.colocate:
                return "nccl"
            return "ipc" if engine.tensor_parallel == 1 else None
        return {"ipc": "ipc", "broadcast": "nccl"}.get(engine.update)

    @classmethod
    def adapter_arguments(cls, needs: AdapterNeeds) -> list[str]:
        """See `InferenceServer.adapter_arguments`. In host memory it keeps more, so that it reads
        none again."""
        rank = next((one for one in _RANKS if one >= needs.rank), needs.rank)
        return [
            "--enable-lora",
            *("--max-lora-rank", str(rank)),
            *("--lora-target-modules", *needs.modules),
            *("--max-loras", str(needs.per_batch)),
            *("--max-cpu-loras", str(2 * needs.per_batch)),
        ]

    async def describe(self) -> ServerDescription:
        """See `InferenceServer.describe`."""
        self._features = VllmFeatures.of(await self._json("GET", "/openapi.json"))
        info = await self._json("GET", "/server_info", params={"config_format": "json"})
        found = description_of(
            self._features, info.get("vllm_config") or {}, info.get("vllm_env") or {}
        )
        self._by_handles = "ipc" in found.ways
        self._model = await self.served_name()
        return found

    async def alive(self) -> bool:
        """See `InferenceServer.alive`. The page fails once the engine behind it has ended."""
        try:
            await self._send("GET", "/health")
        except (ServerGone, BrokenReply, Refused):
            return False
        return True

    async def healthy(self) -> bool:
        """See `InferenceServer.healthy`."""
        if not await self.alive():
            return False
        try:
            return (await self._json("GET", "/is_paused")).get("is_paused") is False
        except (ServerGone, BrokenReply, Refused):
            return False

    async def probe(self) -> bool:
        """See `InferenceServer.probe`."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return len(reply_of(await self._generate("probe", [0], sampling)).token_ids) == 1
        except (ServerGone, BrokenReply, Refused, TimeoutError):
            return False

    async def load(self) -> ServerLoad:
        """See `InferenceServer.load`."""
        text = (await self._send("GET", "/metrics")).decode(errors="replace")
        try:
            return load_of(text)
        except ValueError as error:
            raise BrokenReply(f"/metrics of {self.url} answered no metrics") from error

    async def served_name(self) -> str | None:
        """See `InferenceServer.served_name`."""
        models = (await self._json("GET", "/v1/models")).get("data") or [{}]
        name = models[0].get("id")
        return None if name is None else str(name)

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
        answer = await self._generate(
            turn.key, prompt, sampling_of(turn), adapter=adapter, cache_key=cache_key
        )
        reply = reply_of(answer)
        if routing is None or not reply.token_ids:
            return reply
        return routes_of(reply, answer, routing, len(prompt) + len(reply.token_ids))

    async def score(
        self,
        key: str,
        ids: Sequence[int],
        start: int,
        *,
        adapter: str | None = None,
        cache_key: str | None = None,
    ) -> list[float]:
        """See `InferenceServer.score`. One token is drawn: the server draws no fewer."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._generate(key, ids, sampling, adapter=adapter, cache_key=cache_key)
        return prompt_logprobs(answer, ids)[start:]

    async def _generate(
        self,
        key: str,
        ids: Sequence[int],
        sampling: Json,
        *,
        adapter: str | None = None,
        cache_key: str | None = None,
    ) -> Json:
        """The answer of the server. No time limit of its own: the caller's deadline cancels."""
        body: Json = {
            "request_id": key,
            "model": adapter or self._model,
            "token_ids": orjson.Fragment(TokenIds.of(ids).json),
            "sampling_params": sampling,
        }
        if cache_key is not None:
            body["cache_salt"] = cache_key
        return await self._json("POST", _GENERATE, body, seconds=None, reuse=True)

    async def abort(self, key: str) -> None:
        """See `InferenceServer.abort`."""
        await self._send("POST", "/abort_requests", {"request_ids": [_KEY.format(key)]})

    async def pause(self, turns: RunningTurns) -> bool:
        """See `InferenceServer.pause`."""
        await self._send("POST", "/pause", params={"mode": _PAUSES[turns], "clear_cache": "false"})
        return False

    async def resume(self) -> None:
        """See `InferenceServer.resume`."""
        await self._send("POST", "/resume")

    async def flush_cache(self) -> None:
        """See `InferenceServer.flush_cache`."""
        await self._acknowledged("/reset_prefix_cache")

    async def version(self) -> str | None:
        """See `InferenceServer.version`."""
        if self._features is None or not self._features.version_call:
            return None
        name = (await self._json("GET", "/weight_info")).get("weight_version")
        return None if name is None else str(name)

    async def set_version(self, name: str) -> None:
        """See `InferenceServer.set_version`."""
        await self._acknowledged("/update_weight_version", {"new_version": name})

    async def weights_digest(self, num_bytes: int) -> str | None:
        """See `InferenceServer.weights_digest`."""
        if self._features is None or not self._features.checksum:
            return None
        try:
            reply = await self._json(
                "POST", "/weight_checker", {"action": "checksum"}, seconds=seconds_for(num_bytes)
            )
        except Refused:
            return None
        found = reply.get("checksums")
        return None if not found else str(sorted(found.items()))

    async def load_directory(self, path: str, name: str, num_bytes: int, *, flush: bool) -> None:
        """See `InferenceServer.load_directory`. The weights are named by `set_version`."""
        del name
        seconds = seconds_for(num_bytes)
        # The server was launched with `dummy`, which it would use again, and refuse.
        await self._call("update_config", seconds, args=[{"load_config": {"load_format": "auto"}}])
        await self._call("reload_weights", seconds, kwargs={"weights_path": path})
        if flush:
            await self.flush_cache()

    async def begin_update(self) -> None:
        """See `InferenceServer.begin_update`. A server that takes handles is told how they come."""
        if self._by_handles:
            info: Json = {"init_info": {"packed": True}}
            await self._send("POST", "/init_weight_transfer_engine", info)
        await self._send("POST", "/start_weight_update")

    async def end_update(self) -> None:
        """See `InferenceServer.end_update`. Refused unless an update has begun and none of its
        calls has failed."""
        await self._send("POST", "/finish_weight_update", {})

    async def join_group(self, group: trainer_pb.UpdateGroup) -> None:
        """See `InferenceServer.join_group`. Waits for the trainer and all others."""
        info = {
            "nccl_unique_id_b64": base64.b64encode(group.unique_id).decode(),
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "packed": True,
            "packed_buffer_size_bytes": encoding.BUFFER_BYTES,
            "packed_num_buffers": 1,
        }
        await self._send("POST", "/init_weight_transfer_engine", {"init_info": info})

    async def leave_group(self, name: str) -> None:
        """See `InferenceServer.leave_group`. There is one at a time."""
        del name
        await self._send("POST", "/shutdown_weight_transfer_engine")

    async def load_handles(self, bucket: trainer_pb.WeightBucket, num_bytes: int) -> None:
        """See `InferenceServer.load_handles`."""
        await self._update(bucket, num_bytes)

    async def load_broadcast(
        self, group: str, bucket: trainer_pb.WeightBucket, num_bytes: int
    ) -> None:
        """See `InferenceServer.load_broadcast`."""
        del group
        await self._update(bucket, num_bytes)

    async def _update(self, bucket: trainer_pb.WeightBucket, num_bytes: int) -> None:
        info = encoding.as_update(bucket)
        seconds = seconds_for(num_bytes)
        await self._send("POST", "/update_weights", {"update_info": info}, seconds=seconds)

    async def load_adapter(self, name: str, content: AdapterContent, *, shared: bool) -> None:
        """See `InferenceServer.load_adapter`. As files, which the server must see."""
        del shared
        place = self._adapters[name] = Scratch("troupe-adapter-")
        try:
            await asyncio.to_thread(content.save, place.path)
            await self._send(
                "POST",
                "/v1/load_lora_adapter",
                {"lora_name": name, "lora_path": str(place.path)},
                seconds=seconds_for(sum(tensor.nbytes for tensor in content.tensors.values())),
            )
        except BaseException:
            self._forget(name)
            raise

    async def unload_adapter(self, name: str) -> None:
        """See `InferenceServer.unload_adapter`."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        self._forget(name)

    async def release_memory(self, tags: Collection[str]) -> None:
        """See `InferenceServer.release_memory`. Weights are dropped: they are loaded anew."""
        if "weights" in tags:
            await self._send("POST", "/sleep", params={"level": "2"})
        else:
            await self._send("POST", "/release_kv_cache_memory")

    async def resume_memory(self, tags: Collection[str]) -> None:
        """See `InferenceServer.resume_memory`."""
        for tag in sorted(tags, reverse=True):  # weights first
            await self._send("POST", "/wake_up", params={"tags": tag})

    async def _call(self, method: str, seconds: float, **arguments: Any) -> None:
        """Have every worker process of the server call one of its methods."""
        await self._send(
            "POST", "/collective_rpc", {"method": method, **arguments}, seconds=seconds
        )

    async def _acknowledged(self, path: str, body: Json | None = None) -> None:
        reply = await self._json("POST", path, body, seconds=CONTROL_SECONDS)
        if reply.get("success") is not True:
            raise Refused(path, 200, str(reply))

    def _forget(self, name: str) -> None:
        if (place := self._adapters.pop(name, None)) is not None:
            place.close()


def sampling_of(turn: EngineTurn) -> Json:
    """Sampling parameters for the rest of `turn`. Raises `Refused` for a truncation unless
    log-probs of the truncated distribution are expected, since the server reports these."""
    sampling = turn.sampling
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    if truncated and sampling.logprobs != "processed":
        raise Refused(
            _GENERATE,
            400,
            "vLLM reports log-probs of the tokens that top_p and top_k leave: set the agent's "
            "`sampling.logprobs: processed`, remove top_p and top_k, or serve the policy with "
            "`kind: sglang` or `embedded`",
        )
    found: Json = {
        "max_tokens": turn.remaining,
        "temperature": sampling.temperature,
        "logprobs": 0,
        "stop_token_ids": sorted(turn.stop_ids),
        # The end of the model is among `stop_ids`, where it counts.
        "ignore_eos": True,
        "detokenize": False,
    }
    if truncated:
        found |= {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
    if sampling.seed is not None:
        # A request draws by its seed from its first token on; tokens that continue an aborted
        # request must not be drawn by the same numbers.
        drawn = sampling.drawn + len(turn.token_ids)
        found["seed"] = (turn.seed + _SEED_STEP * drawn) & _INT63
    return found

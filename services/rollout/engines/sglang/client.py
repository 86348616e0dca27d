"""SGLang's HTTP API as Troupe uses it: calls, features of a release, load report, replies.

Read from releases 0.4.6 to 0.5.23 and tested against a real 0.5.21 (the slow test). What a server
can do is read from its own OpenAPI document, never from its version number.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np
import orjson

from services.rollout.engines.errors import BadTurn, BrokenReply, Refused, ReplyBroken, ServerGone
from services.rollout.engines.turns import EngineTurn
from troupe.mixtures import Indices, RoutingShape
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.workflow.token_ids import TokenIds

# A server that is alive accepts within milliseconds; one that loads weights may take a minute.
CONNECT_SECONDS: Final = 5.0
CONTROL_SECONDS: Final = 60.0
# Shorter than the five seconds after which servers close idle connections: one that they are
# closing would cost a turn.
_IDLE_SECONDS: Final = 3.0
# `/health_generate` waits a second before it looks. Shorter than the timeout of callers of `check`,
# so that a missed probe is counted.
HEALTH_SECONDS: Final = 15.0

# Weights that come from a slow disk, or that are hashed while turns run.
_SLOWEST_BYTES_PER_SECOND: Final = 50e6
# For the one token of `probe`; a busy server answers a little later.
PROBE_SECONDS: Final = 10.0
# An id outside every vocabulary, and the part of a server's refusal that has the largest id.
_NO_TOKEN: Final = 1 << 40
_VOCABULARY: Final = re.compile(r"\[0, (\d+)\]")
# Largest seed that servers take.
_INT64: Final = (1 << 63) - 1

_JSON: Final = {"content-type": "application/json"}

Json = dict[str, Any]


class SglangClient:
    """One server. Every method raises `ServerGone`, `BrokenReply` or `Refused`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Drop all connections."""
        self._closed = True
        if self._http is not None:
            await self._http.close()

    async def features(self) -> Features:
        """Features of the server."""
        return Features.of(await self._json("GET", "/openapi.json"))

    async def model_info(self) -> Json:
        """Model path and type, and the current `weight_version`."""
        return await self._first_of("/model_info", "/get_model_info")

    async def server_info(self) -> Json:
        """The server's arguments and limits: `tp_size`, `dp_size`, `max_req_input_len`, ..."""
        return await self._first_of("/server_info", "/get_server_info")

    async def alive(self) -> bool:
        """Whether the HTTP server answers at all (a paused one does)."""
        try:
            await self.model_info()
        except (ServerGone, BrokenReply, Refused):
            return False
        return True

    async def healthy(self) -> bool:
        """Whether it can generate a token. Takes a second. A paused server cannot."""
        try:
            await self._send("GET", "/health_generate", seconds=HEALTH_SECONDS)
        except (ServerGone, BrokenReply, Refused):
            return False
        return True

    async def probe(self) -> bool:
        """Whether an ordinary request gets its token: the health page may answer without one."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            reply = await self._json("POST", "/generate", body, seconds=PROBE_SECONDS)
        except (ServerGone, BrokenReply, Refused):
            return False
        return len(reply.get("output_ids") or []) == 1

    async def vocabulary(self) -> int | None:
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

    async def tokenize(self, text: str) -> list[int] | None:
        """Ids of `text` by the server's tokenizer; None where it has none, or lacks this call,
        which is in no release's document."""
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
        rid: str,
        input_ids: Sequence[int],
        sampling: Json,
        *,
        logprobs_from: int | None = None,
        adapter: str | None = None,
        routed_experts: bool = False,
        cache_key: str | None = None,
    ) -> Json:
        """The reply's `meta_info`. No time limit of its own: the caller's deadline cancels.

        `logprobs_from`: also log-probs of the prompt's tokens after this position.
        `adapter`: name of a loaded LoRA adapter. `routed_experts`: also say which experts tokens
        were sent to. `cache_key`: cached prefixes are shared with requests of the same key only.
        """
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
        reply = await self._json("POST", "/generate", body, seconds=None)
        meta = reply.get("meta_info")
        if not isinstance(meta, dict) or "finish_reason" not in meta:
            raise BrokenReply(f"/generate of {self.url} answered without meta_info")
        return meta

    async def abort(self, rid: str) -> None:
        """End one request; unknown ids are ignored by the server."""
        await self._send("POST", "/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every request of the server."""
        await self._send("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: str | None) -> None:
        """Stop generating; `mode` None for servers that know only one."""
        await self._send("POST", "/pause_generation", {"mode": mode} if mode else {})

    async def resume(self) -> None:
        """Generate again."""
        await self._send("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Refused while something runs."""
        await self._send("POST", "/flush_cache", {})

    async def set_version(self, version: str) -> None:
        """Name the loaded weights, without aborting turns as the default would."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._acknowledged("/update_weight_version", body)

    async def begin_update(self) -> None:
        """Open a session for tensor updates."""
        await self._acknowledged("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        """Close the session."""
        await self._acknowledged("/end_weight_update", {})

    async def update_from_disk(
        self, path: str, version: str, num_bytes: int = 0, *, flush: bool = False
    ) -> None:
        """Load safetensors of `num_bytes` from a directory that the server sees. `flush`: then
        forget cached prefixes; refused, after the load, while something runs."""
        await self._acknowledged(
            "/update_weights_from_disk",
            {
                "model_path": path,
                # The server may have been launched with `dummy`, which it would use again.
                "load_format": "auto",
                "flush_cache": flush,
                "weight_version": version,
            },
            seconds_for(num_bytes),
        )

    async def join_group(self, group: trainer_pb.UpdateGroup) -> None:
        """Join a process group with the trainer, whose rank 0 waits there."""
        await self._acknowledged(
            "/init_weights_update_group",
            {
                "master_address": group.host,
                "master_port": group.port,
                "rank_offset": 1,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.backend,
            },
        )

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self._acknowledged("/destroy_weights_update_group", {"group_name": name})

    async def update_from_group(
        self, group: str, bucket: trainer_pb.WeightBucket, num_bytes: int
    ) -> None:
        """Load what the trainer broadcasts in the group: tensors of `num_bytes` as a flat one."""
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

    async def update_from_tensors(
        self,
        payloads: list[str],
        version: str | None,
        num_bytes: int = 0,
        *,
        load_format: str | None = None,
    ) -> None:
        """Load serialized tensors, one payload per tensor-parallel rank; `version` names what is
        loaded afterwards, None leaves the name. `num_bytes`: of the tensors. `load_format`: of the
        payloads, where they are no tensors by name."""
        body: Json = {"serialized_named_tensors": payloads, "flush_cache": False}
        if load_format is not None:
            body["load_format"] = load_format
        if version is not None:
            body["weight_version"] = version
        await self._acknowledged("/update_weights_from_tensor", body, seconds_for(num_bytes))

    async def release_memory(self, tags: Collection[str]) -> None:
        """Free weights, key-value cache or both. Only when idle: it kills a busy scheduler."""
        await self._send("POST", "/release_memory_occupation", {"tags": sorted(tags)})

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate the memory again; its contents are undefined."""
        await self._send("POST", "/resume_memory_occupation", {"tags": sorted(tags)})

    async def load_adapter(self, name: str, config: Mapping[str, Any], payloads: list[str]) -> None:
        """Load a LoRA adapter from serialized tensors, one payload per tensor-parallel rank."""
        await self._acknowledged(
            "/load_lora_adapter_from_tensors",
            {"lora_name": name, "config_dict": dict(config), "serialized_named_tensors": payloads},
        )

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter, once no request uses it."""
        await self._acknowledged("/unload_lora_adapter", {"lora_name": name})

    async def weights_digest(self, num_bytes: int = 0) -> str | None:
        """The server's own checksum of its weights, of `num_bytes`; None where it cannot compute
        one.

        0.5.21 needs CUDA for it and answers 400 on a CPU.
        """
        try:
            reply = await self._json(
                "POST", "/weights_checker", {"action": "checksum"}, seconds=seconds_for(num_bytes)
            )
        except Refused:
            return None
        digest = reply.get("per_engine_checksum") or reply.get("ranks")
        return None if digest is None else str(digest)

    async def load(self, path: str) -> ServerLoad:
        """The server's load report at `path` (`Features.loads`)."""
        reply = await self._json("GET", path, params={"include": "core"})
        try:
            return ServerLoad.of(reply)
        except (AttributeError, TypeError, ValueError) as error:
            raise BrokenReply(f"{path} of {self.url} answered no load report") from error

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

    async def _json(self, method: str, path: str, body: Json | None = None, **kwargs: Any) -> Json:
        content = await self._send(method, path, body, **kwargs)
        try:
            reply = orjson.loads(content)
        except ValueError as error:
            raise BrokenReply(f"{path} of {self.url} did not answer JSON") from error
        if isinstance(reply, list):  # `/get_load` of older releases
            return {"loads": reply}
        if not isinstance(reply, dict):
            raise BrokenReply(f"{path} of {self.url} answered no JSON object")
        return reply

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        params: Mapping[str, str] | None = None,
        seconds: float | None = CONTROL_SECONDS,
    ) -> bytes:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session().request(
                method,
                self.url + path,
                data=data,
                params=params,
                headers=_JSON if data is not None else None,
                timeout=aiohttp.ClientTimeout(seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerGone(f"{path} of {self.url}: {error!r}") from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise ServerGone(f"{path} of {self.url}: {error}") from error
        if response.ok:
            return content
        raise Refused(path, response.status, _message(content))

    def _session(self) -> aiohttp.ClientSession:
        """The connections. They belong to the event loop of the first call."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._http is None:
            self._http = aiohttp.ClientSession(
                # The engine limits turns in flight; a second limit would only hide the queue.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No proxy of the environment: engines are on this network.
                trust_env=False,
            )
        return self._http


def seconds_for(num_bytes: int) -> float:
    """How long a server may take to read so many bytes of weights."""
    return CONTROL_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND


def _message(content: bytes) -> str:
    """The error message of a reply; releases put it in different places."""
    try:
        reply = orjson.loads(content)
    except ValueError:
        return content.decode(errors="replace")[:500]
    if isinstance(reply, dict):
        error = reply.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        found = (reply.get(key) for key in ("message", "error_message", "detail"))
        return str(inner or next(filter(None, found), reply))[:500]
    return str(reply)[:500]


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


@dataclass(frozen=True)
class ServerLoad:
    """A server's load report, summed over its schedulers; 0 where a release lacks a number.

    `uncached_tokens`: prompt tokens of waiting requests that no cached prefix covers. `kv_usage`
    and `cache_hit_rate`: fractions, the largest and the mean of the schedulers.
    """

    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
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
            kv_usage=max((float(e.get("token_usage") or 0) for e in entries), default=0.0),
            cache_hit_rate=sum(rates) / len(rates) if rates else 0.0,
        )


@dataclass(frozen=True)
class GenerateReply:
    """The answer of `/generate`; the lists have equal length.

    `versions` is None when the server does not tell tokens drawn before an update from later ones.
    `reason` is SGLang's: stop, length or abort."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int] | None
    reason: str
    message: str
    cached_tokens: int


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


def parse(
    meta: dict[str, Any], asked_of: int | None, *, steady: bool, adapter: int | None = None
) -> GenerateReply:
    """Read `meta_info` of a request that was sent when the server held version `asked_of`.

    `steady`: no update has begun since. `adapter`: the version of the adapter that drew every
    token, whatever the server calls the weights under it. Raises `BrokenReply`.
    """
    try:
        # An abort before prefill has no log-probs at all.
        rows = meta.get("output_token_logprobs") or []
        given, ids, *_ = zip(*rows, strict=False) if rows else ((), ())
        tokens, logprobs = list(map(int, ids)), _numbers(given)
        finish = meta["finish_reason"]
        versions: list[int] | None = [adapter or 0] * len(tokens)
        if adapter is None:
            versions = _versions(meta, len(tokens), asked_of, steady)
        count = meta.get("completion_tokens", len(tokens))
        if count != len(tokens) or (versions is not None and len(versions) != len(tokens)):
            raise BrokenReply(f"{count} tokens, but {len(tokens)} log-probs")
        return GenerateReply(
            tokens,
            logprobs,
            versions,
            reason=str(finish["type"]),
            message=str(finish.get("message") or ""),
            cached_tokens=int(meta.get("cached_tokens") or 0),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"not the answer to a generation: {error!r}") from error


def routed_experts(meta: dict[str, Any], shape: RoutingShape, tokens: int) -> Indices:
    """The experts that the first `tokens` - 1 of prompt and response were sent to, [tokens - 1,
    layers, k]: int32 in base64, of all layers. Raises `BrokenReply`."""
    try:
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        routes = shape.compact(found.reshape(-1, shape.layers, shape.top_k))
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenReply(f"it does not say which experts it used: {error!r}") from error
    if problem := shape.problem(routes, tokens):
        raise BrokenReply(problem)
    return routes


def prompt_logprobs(meta: dict[str, Any]) -> list[float]:
    """Log-probs of the prompt's tokens after the first. Raises `BrokenReply`."""
    try:
        return _numbers([row[0] for row in meta["input_token_logprobs"][1:]])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BrokenReply(f"no log-probs of the prompt: {error!r}") from error


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Log-probs; JSON has no NaN, so servers write null for what broken weights compute."""
    return [math.nan if value is None else float(value) for value in values]


def _versions(
    meta: dict[str, Any], count: int, asked_of: int | None, steady: bool
) -> list[int] | None:
    """The version of each token; None when it changed at an unknown token."""
    spans = meta.get("weight_versions")
    if spans:
        versions: list[int] = []
        for span in spans:
            if span["start"] != len(versions):
                raise BrokenReply(f"version spans do not join at token {len(versions)}")
            versions.extend([int(span["version"])] * (span["end"] - span["start"]))
        return versions
    # Older releases name the version that was loaded at the end.
    label = meta.get("weight_version")
    unchanged = str(label) == str(asked_of) if str(label).isdecimal() else steady
    if count == 0 or (unchanged and asked_of is not None):
        return [asked_of or 0] * count
    return None


def broken(engine_id: str, turn: EngineTurn, error: Exception) -> ReplyBroken:
    """The error of a turn whose answer is unusable, from a server that is alive."""
    return ReplyBroken(engine_id, turn.request_id, str(error))


def refused(engine_id: str, turn: EngineTurn, error: Refused) -> Exception:
    """The error of a refused turn: the server's fault (5xx), or the request's."""
    if error.status >= 500:
        return broken(engine_id, turn, error)
    return BadTurn(
        f"engine {engine_id} refused the turn: {error.message}",
        field="request_id",
        value=turn.request_id,
        remedy="See the server's message; its limits are in its log.",
    )

"""The HTTP routes of the double of SGLang's server."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.support.fake_sglang import FakeSglang


class PauseGenerationReqInput(BaseModel):
    """Releases from 0.5.6 know modes; the name is what the client looks for."""

    mode: str = "abort"


class GenerateReqInput(BaseModel):
    """The field of newer releases that the client looks for; the others are taken as they come."""

    model_config = ConfigDict(extra="allow")
    extra_key: str | None = None


class UpdateWeightsFromTensorReqInput(BaseModel):
    """The name and the format are what the client looks for."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


class UpdateWeightsFromDistributedReqInput(BaseModel):
    """The same for process groups."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None


def add_routes(fake: FakeSglang) -> None:
    """Answer over HTTP for `fake`."""
    app = fake.app

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        fake.seen.append(request.url.path)
        while fake.faults.hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await call_next(request)

    @app.get("/get_model_info" if fake.old else "/model_info")
    async def model_info() -> dict[str, Any]:
        info = {"model_path": "m", "weight_version": fake.version}
        return info if fake.old else {**info, "model_type": fake.model_type}

    @app.get("/get_server_info" if fake.old else "/server_info")
    async def server_info() -> dict[str, Any]:
        fake.info["max_total_num_tokens"] = 20000
        return fake.info

    @app.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=503 if fake.paused or fake.faults.unhealthy else 200)

    @app.post("/generate")
    async def generate(given: GenerateReqInput) -> Response:
        response = await fake.generate(given.model_dump(exclude_unset=True))
        half = bytes(response.body[: len(response.body) // 2])
        if fake.faults.cut_reply:
            return Response(half, response.status_code)
        if fake.faults.cut_connection:
            length = {"content-length": str(len(response.body))}
            return Response(half, response.status_code, headers=length)
        return response

    @app.post("/abort_request")
    async def abort(body: dict[str, Any]) -> Response:
        for rid, call in fake.calls.items():
            if body.get("abort_all") or rid == body["rid"]:
                call.aborted = True
        return Response()

    @app.post("/flush_cache")
    async def flush() -> Response:
        busy = bool(fake.calls) and not fake.paused
        return Response("busy" if busy else "flushed", 400 if busy else 200)

    @app.post("/update_weights_from_disk")
    async def from_disk(body: dict[str, Any]) -> Response:
        path = Path(body["model_path"]) / "model.safetensors"
        hidden = fake.faults.refuse_update or fake.faults.blind
        if hidden or not path.exists():
            return _outcome(False, f"Failed to get weights iterator: {path}")
        fake.read.append(path.stat().st_ino)
        fake.load(load_file(path))
        if body.get("weight_version") is not None:
            fake.version = body["weight_version"]
        if body.get("flush_cache", True) and fake.calls and not fake.paused:
            return _outcome(False, "Cache flush failed after updating weights")
        return _outcome(True, "Succeeded to update model weights.")

    @app.post("/weights_checker")
    async def checker() -> Response:
        if not fake.has_cuda:
            return _outcome(False, "Torch not compiled with CUDA enabled")
        return JSONResponse({"per_engine_checksum": [f"{fake.checksum():.12g}"]})

    if not fake.old:
        _new_routes(fake)


def _new_routes(fake: FakeSglang) -> None:
    app = fake.app

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        running = 0 if fake.paused else len(fake.calls)
        waiting = len(fake.calls) - running
        one = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting + fake.faults.queue,
            "num_waiting_uncached_tokens": 7 * waiting,
            "max_running_requests": 64,
            "token_usage": min(1.0, 0.125 * running),
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
        }
        return {"timestamp": "", "version": fake.info["version"], "loads": [one]}

    @app.post("/tokenize", include_in_schema=False)
    async def tokenize(body: dict[str, Any]) -> Response:
        if fake.tokenizer is None:
            message = "Internal server error during tokenization"
            body = {"object": "error", "message": message, "type": "InternalServerError"}
            return JSONResponse(body | {"param": None, "code": 500}, 500)
        tokens = fake.tokenizer(body["prompt"])
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 256})

    @app.post("/release_memory_occupation")
    async def release(body: dict[str, Any]) -> None:
        assert not fake.calls, "a busy scheduler dies of it"
        fake.released |= set(body["tags"])

    @app.post("/resume_memory_occupation")
    async def resume_memory(body: dict[str, Any]) -> None:
        assert set(body["tags"]) <= fake.released, "a scheduler dies of tags that it has"
        fake.released -= set(body["tags"])

    _adapter_routes(fake)

    @app.post("/pause_generation")
    async def pause(body: PauseGenerationReqInput) -> dict[str, Any]:
        fake.modes.append(body.mode)
        if body.mode == "abort":
            for call in fake.calls.values():
                call.aborted = True
        fake.paused = True
        return {"status": "ok", "message": "Generation paused successfully."}

    @app.post("/continue_generation")
    async def resume() -> dict[str, Any]:
        fake.paused = False
        return {"status": "ok", "message": "Generation continued successfully."}

    @app.post("/update_weight_version")
    async def set_version(body: dict[str, Any]) -> Response:
        if body.get("abort_all_requests", True):
            for call in fake.calls.values():
                call.aborted = True
        fake.version = body["new_version"]
        return _outcome(True, f"Weight version updated to {fake.version}")

    @app.post("/begin_weight_update")
    async def begin() -> Response:
        if fake.session:
            return _outcome(False, "a weight-update session is already open")
        fake.session = True
        return _outcome(True, "Success")

    @app.post("/end_weight_update")
    async def end() -> Response:
        was, fake.session = fake.session, False
        return _outcome(was, "Success" if was else "no weight-update session is open")

    @app.post("/update_weights_from_tensor")
    async def from_tensor(body: UpdateWeightsFromTensorReqInput) -> Response:
        if not fake.session:
            return _outcome(
                False,
                "update_weights_from_tensor must run between begin_weight_update() and "
                "end_weight_update()",
            )
        if fake.faults.refuse_update or fake.buckets_left == 0:
            return _outcome(False, "Failed to get weights")
        fake.buckets_left -= 1
        # Each rank reads its own payload; all must be of the same tensors.
        found = [_received(payload) for payload in body.serialized_named_tensors]
        assert len(found) == fake.info["tp_size"], "one payload for each rank"
        if body.load_format == "flattened_bucket":
            found = [_unflattened(one) for one in found]
        for one in found[1:]:
            assert one.keys() == found[0].keys()
            assert all(torch.equal(one[name], found[0][name]) for name in one)
        fake.load(found[0])
        if body.weight_version is not None:
            fake.version = body.weight_version
        return _outcome(True, "Success")

    _group_routes(fake)


def _group_routes(fake: FakeSglang) -> None:
    """Process groups with a trainer, as 0.5.21 makes and uses them."""
    app = fake.app
    groups: dict[str, Any] = {}

    @app.post("/init_weights_update_group")
    async def join(body: dict[str, Any]) -> Response:
        name = body["group_name"]
        groups[name] = await asyncio.to_thread(_joined, body)
        return _outcome(True, "Succeeded to initialize custom process group.")

    @app.post("/destroy_weights_update_group")
    async def leave(body: dict[str, Any]) -> Response:
        group = groups.pop(body["group_name"], None)
        if group is None:
            return _outcome(False, "The group to be destroyed does not exist.")
        dist.destroy_process_group(group)
        return _outcome(True, "Succeeded to destroy custom process group.")

    @app.post("/update_weights_from_distributed")
    async def from_group(body: UpdateWeightsFromDistributedReqInput) -> Response:
        if not fake.session:
            return _outcome(
                False,
                "update_weights_from_distributed must run between begin_weight_update() and "
                "end_weight_update()",
            )
        group = groups.get(body.group_name)
        if group is None or fake.buckets_left == 0:
            return _outcome(False, f"Failed to receive weights: Group {body.group_name} not in")
        fake.buckets_left -= 1
        if fake.buckets_to_death == 0:
            os._exit(9)
        fake.buckets_to_death -= 1
        assert body.load_format == "flattened_bucket"
        (dtype,) = set(body.dtypes)
        sizes = [torch.Size(shape).numel() for shape in body.shapes]
        flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype))
        await asyncio.to_thread(dist.broadcast, flat, 0, group)
        parts = zip(body.names, flat.split(sizes), body.shapes, strict=True)
        fake.load({name: part.reshape(shape) for name, part, shape in parts})
        if body.weight_version is not None:
            fake.version = body.weight_version
        return _outcome(True, "Succeeded to update parameter online.")


def _joined(body: dict[str, Any]) -> Any:
    """The group of one rank after the trainer's."""
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
    patience = timedelta(seconds=PATIENCE)
    store, rank, size = next(c10d.rendezvous(address, rank, size, timeout=patience))
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(body["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=patience,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _adapter_routes(fake: FakeSglang) -> None:
    """LoRA, which needs CUDA: after 0.5.21's source. Without `--enable-lora`: as recorded."""
    app = fake.app
    one_at_a_time = asyncio.Lock()

    def outcome(error: str | None) -> Response:
        if not fake.info["enable_lora"]:
            error = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        loaded = None if error else dict.fromkeys(fake.adapters, "path")
        body = {
            "rid": None,
            "http_worker_ipc": None,
            "success": error is None,
            "error_message": error,
            "loaded_adapters": loaded,
        }
        return JSONResponse(body, 400 if error else 200)

    async def load(name: str, entry: dict[str, Any]) -> Response:
        async with one_at_a_time:
            if name in fake.adapters:
                return outcome(f"LoRA adapter with name {name} already exists.")
            if fake.info["enable_lora"]:
                fake.adapters[name] = entry
            return outcome(None)

    @app.post("/load_lora_adapter")
    async def load_path(body: dict[str, Any]) -> Response:
        path = Path(body["lora_path"]) / "adapter_config.json"
        if not path.exists():
            return outcome(f"Failed to load LoRA adapter: no {path}")
        return await load(body["lora_name"], {"path": body["lora_path"]})

    @app.post("/load_lora_adapter_from_tensors")
    async def load_tensors(body: dict[str, Any]) -> Response:
        tensors = fake.mistaken or _received(body["serialized_named_tensors"][0])
        return await load(body["lora_name"], {"config": body["config_dict"], "tensors": tensors})

    @app.post("/unload_lora_adapter")
    async def unload(body: dict[str, Any]) -> Response:
        async with one_at_a_time:
            known = fake.adapters.pop(body["lora_name"], None)
            while known and any(c.adapter is known for c in fake.calls.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            return outcome(None if known else f"LoRA adapter {body['lora_name']} is not loaded.")


def _outcome(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


def _unflattened(bucket: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a flat one, as SGLang's `FlattenedTensorBucket` finds them."""
    flat, found = bucket["flattened_tensor"], {}
    for one in bucket["metadata"]:
        assert one.numel == one.end_idx - one.start_idx == one.shape.numel()
        assert one.dtype == flat.dtype
        found[one.name] = flat[one.start_idx : one.end_idx].reshape(one.shape)
    return found


def _received(payload: str) -> dict[str, torch.Tensor]:
    import base64
    import pickle

    # SGLang's own encoding of tensor updates; a test's own data.
    return dict(pickle.loads(base64.b64decode(payload)))

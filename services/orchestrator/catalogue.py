"""The functions that users deployed, with their source: the reward service forgets in a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from services.orchestrator.redis_access import RedisAccess
from troupe.rpc import AlreadyExists, NotFound
from troupe.v1 import reward_pb2 as pb

_PREFIX: Final = "troupe:orchestrator:{functions}"
# Hash: `name@version` -> FunctionSpec. Sorted set: `name@version` by when it was deployed.
# Hash: sha256 -> the UploadSourceRequest with its files.
_SPECS: Final = f"{_PREFIX}:specs"
_ORDER: Final = f"{_PREFIX}:order"
_SOURCES: Final = f"{_PREFIX}:sources"


class Catalogue:
    """Deployed functions in Redis. A name and version stand for one function for good."""

    def __init__(self, redis: RedisAccess, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._clock = clock

    async def keep_source(self, sha256: str, files: pb.UploadSourceRequest) -> None:
        """Keep files of code by their hash."""
        kept = pb.UploadSourceRequest(files=files.files)
        await self._redis.call("HSETNX", _SOURCES, sha256, kept.SerializeToString())

    async def source(self, sha256: str) -> pb.UploadSourceRequest:
        """The files. Raises `NotFound` of kind "source_not_found"."""
        kept = await self._redis.call("HGET", _SOURCES, sha256)
        if kept is None:
            raise NotFound(
                "no such source was uploaded",
                kind="source_not_found",
                field="function.source_sha256",
                value=sha256,
                remedy="Upload it before the function that it belongs to.",
            )
        return pb.UploadSourceRequest.FromString(kept)

    async def check(self, spec: pb.FunctionSpec) -> None:
        """Raises `AlreadyExists` when the name and version stand for another function."""
        kept = await self._redis.call("HGET", _SPECS, _key(spec.name, spec.version))
        if kept is not None and pb.FunctionSpec.FromString(kept) != spec:
            raise AlreadyExists(
                f"version {spec.version!r} of this function is deployed with other code or costs",
                kind="function_differs",
                field="function.name",
                value=spec.name,
                remedy="Deploy it under a new version, or delete the old one.",
            )

    async def keep(self, spec: pb.FunctionSpec) -> None:
        """Keep a function. Raises `AlreadyExists`, as `check`."""
        key = _key(spec.name, spec.version)
        kept = spec.SerializeToString(deterministic=True)
        if not await self._redis.call("HSETNX", _SPECS, key, kept):
            await self.check(spec)
        await self._redis.call("ZADD", _ORDER, "NX", self._clock(), key)

    async def delete(self, name: str, version: str) -> bool:
        """Forget a function, and its source when no other has it. False: there was none."""
        key = _key(name, version)
        kept = await self._redis.call("HGET", _SPECS, key)
        await self._redis.call("ZREM", _ORDER, key)
        await self._redis.call("HDEL", _SPECS, key)
        if kept is None:
            return False
        sha256 = pb.FunctionSpec.FromString(kept).source_sha256
        if sha256 and all(spec.source_sha256 != sha256 for spec in await self.all()):
            await self._redis.call("HDEL", _SOURCES, sha256)
        return True

    async def all(self) -> list[pb.FunctionSpec]:
        """The functions, oldest first."""
        keys = await self._redis.call("ZRANGE", _ORDER, 0, -1)
        if not keys:
            return []
        kept = await self._redis.call("HMGET", _SPECS, *keys)
        return [pb.FunctionSpec.FromString(one) for one in kept if one is not None]

    async def find(self, name: str, version: str = "") -> pb.FunctionSpec:
        """The function; without `version` the one deployed last. Raises `NotFound` of kind
        "function_not_found"."""
        found = [f for f in await self.all() if f.name == name and version in ("", f.version)]
        if not found:
            raise NotFound(
                f"no function of {f'version {version!r}' if version else 'this name'} is deployed",
                kind="function_not_found",
                field="name",
                value=name,
                remedy="`troupe functions list` shows what is; `troupe functions deploy` adds one.",
            )
        return found[-1]


def _key(name: str, version: str) -> str:
    return f"{name}@{version}"

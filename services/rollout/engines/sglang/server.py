"""The server behind an engine: brought up, looked over, taken down."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.models import load_config, skeleton, stop_ids
from services.rollout.engines.sglang import launch
from services.rollout.engines.sglang.claims import claim, release
from services.rollout.engines.sglang.client import (
    BrokenReply,
    Refused,
    ServerGone,
    SglangClient,
)
from services.rollout.engines.sglang.features import Features, ServerLoad
from services.rollout.engines.sglang.inspection import inspect
from services.rollout.engines.sglang.loading import DiskLoader, choose_loader
from services.rollout.engines.sglang.lora import check_server, target_names
from services.rollout.engines.sglang.process import ServerProcess, free_port
from services.rollout.engines.sglang.update import Updater
from troupe.job import PolicySpec
from troupe.scratch import Scratch

_POLL_SECONDS: Final = 0.25
# Turns that were aborted leave the server within this time.
_IDLE_SECONDS: Final = 10.0
# Launches until one finds a port that nobody takes meanwhile.
_PORTS_TRIED: Final = 3


class _ForeignServer(Exception):
    """What answers on the port of a launched server is not that server."""


class Server:
    """One server and what is known of it. After `up` the attributes without underscore are set."""

    client: SglangClient
    updater: Updater
    layout: PreTrainedModel
    """The policy's model without storage: names, shapes and dtypes of its weights."""
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    features: Features
    ranks: int
    """Tensor-parallel size."""
    schedules_by_priority: bool
    frees_memory: bool
    """Whether weights and cache can be released while it runs."""
    near: bool
    """Whether its address is this host's."""

    def __init__(
        self,
        policy: str,
        spec: PolicySpec,
        *,
        replica: int,
        work_dir: Path | None,
        deterministic: bool,
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._replica = replica
        self._given_dir = work_dir
        self._scratch: Scratch | None = None
        self._deterministic = deterministic
        self._process: ServerProcess | None = None
        # A launched server carries it, so that no other one is mistaken for it.
        self._name = ""

    @property
    def launched(self) -> bool:
        """Whether the server is ours to end."""
        return not self._spec.engine.urls

    @property
    def exited(self) -> str | None:
        """How a launched server ended; None while it runs, and for attached ones."""
        process = self._process
        if process is None or process.running:
            return None
        return f"the server exited with code {process.exit_code}; last lines of its log:\n" + (
            process.tail() or "(empty)"
        )

    async def up(self) -> None:
        """Launch or attach and wait until it serves. Raises `EngineStartFailed`."""
        await self.down(for_good=False)
        seconds = self._spec.engine.start_timeout_seconds
        config = await asyncio.to_thread(self._read_model)
        try:
            async with asyncio.timeout(seconds):
                for left in reversed(range(_PORTS_TRIED)):
                    url = self._attached_url() or await self._launched_url(config)
                    self.client = SglangClient(url)
                    try:
                        await self._ready()
                        await self._look_over(config)
                        break
                    except _ForeignServer as error:
                        await self.down(for_good=False)
                        if not left:
                            raise self._unlaunchable(str(error)) from error
        except TimeoutError as error:
            tail = self._process.tail() if self._process is not None else ""
            await self.down(for_good=False)
            raise EngineStartFailed(
                f"the server was not ready within {seconds:g} s" + (f":\n{tail}" if tail else ""),
                field=f"policies.{self._policy}.engine.start_timeout_seconds",
                value=seconds,
                remedy="Allow more time, or see its log.",
            ) from error
        except BaseException:
            await self.down(for_good=False)
            raise

    async def down(self, *, for_good: bool) -> None:
        """End a launched server and our connections; `for_good` also deletes our files."""
        if hasattr(self, "client"):
            await self.client.close()
        if self._process is not None:
            await self._process.stop()
            self._process = None
        release(self)
        if for_good and self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)
            self._scratch = None

    async def load(self) -> ServerLoad:
        """What the server has to do; zeros where it does not tell."""
        if self.features.loads is None:
            return ServerLoad()
        return await self.client.load(self.features.loads)

    async def free(self, tags: Collection[str]) -> None:
        """Release memory once the server is idle: a busy scheduler would die of it."""
        async with asyncio.timeout(_IDLE_SECONDS):
            while (load := await self.load()).running or load.waiting:  # noqa: ASYNC110 - not ours
                await asyncio.sleep(_POLL_SECONDS / 5)
        await self.client.release_memory(tags)

    @property
    def _directory(self) -> Path:
        if self._given_dir is not None:
            return self._given_dir
        if self._scratch is None:
            self._scratch = Scratch("troupe-sglang-")
        return self._scratch.path

    def _read_model(self) -> PretrainedConfig:
        model = self._spec.language_model
        config = load_config(model, self._policy)
        with torch.device("meta"):
            self.layout = skeleton(config, model.dtype, self._policy)
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        self.max_context = min(self._spec.engine.max_context, positions or 1 << 30)
        self.vocabulary = text.vocab_size
        self.eos_ids = stop_ids(config, model.path, model.revision)
        return config

    def _attached_url(self) -> str | None:
        urls = self._spec.engine.urls
        if urls and self._replica >= len(urls):
            raise EngineStartFailed(
                f"replica {self._replica} has no server: {len(urls)} are given",
                field=f"policies.{self._policy}.engine.urls",
                value=urls,
                remedy="Give one URL per replica, or lower `replicas`.",
            )
        if not urls:
            return None
        url = urls[self._replica]
        if not claim(url, self):
            raise EngineStartFailed(
                "another engine of this worker is attached to that server",
                field=f"policies.{self._policy}.engine.urls",
                value=url,
                remedy="Give each engine a server of its own; release the job that has this one.",
            )
        return url

    async def _launched_url(self, config: PretrainedConfig) -> str:
        spec = self._spec
        source = spec.language_model.path
        if source is None:
            architecture = type(self.layout).__name__
            directory = launch.write_config(config, architecture, self._directory / "model")
            source = str(directory)
        port = free_port()
        self._name = f"troupe-{secrets.token_hex(6)}"
        command = launch.command(
            spec,
            source,
            port,
            self.max_context,
            deterministic=self._deterministic,
            name=self._name,
            targets=target_names(spec, self.layout),
        )
        process = ServerProcess(command, self._directory / "server.log")
        try:
            await process.start()
        except OSError as error:
            raise self._unlaunchable(f"the server cannot be started: {error}") from error
        self._process = process
        return f"http://127.0.0.1:{port}"

    def _unlaunchable(self, reason: str) -> EngineStartFailed:
        return EngineStartFailed(
            reason,
            field=f"policies.{self._policy}.engine.python",
            value=self._spec.engine.python,
            remedy="Name the Python of an environment with SGLang, give `urls`, or use "
            "`kind: embedded`.",
        )

    async def _ready(self) -> None:
        while not await self.client.alive():
            if self.exited is not None:
                raise self._unlaunchable(self.exited)
            await asyncio.sleep(_POLL_SECONDS)
        if self.launched:
            await self._is_ours()
        else:
            # A rollout process that died in the middle of an update leaves the server paused.
            for mend in (self.client.end_update, self.client.resume):
                with contextlib.suppress(Refused):
                    await mend()
        while not await self.client.healthy():
            if self.exited is not None:
                raise self._unlaunchable(self.exited)
            await asyncio.sleep(_POLL_SECONDS)

    async def _is_ours(self) -> None:
        """Raise `_ForeignServer` when somebody else answers on our port: ours will not get it."""
        if "--served-model-name" in self._spec.engine.launch:
            return
        with contextlib.suppress(ServerGone, BrokenReply, Refused):
            name = (await self.client.server_info()).get("served_model_name", self._name)
            if name != self._name:
                port = httpx.URL(self.client.url).port
                raise _ForeignServer(f"port {port} is held by another server, '{name}'")

    async def _look_over(self, config: PretrainedConfig) -> None:
        """Find out what it can do, and whether it is the policy's model at all."""
        spec, client = self._spec, self.client
        launched = self.launched
        features, info = await inspect(
            client,
            self._policy,
            config,
            deterministic=self._deterministic,
            tokenizer=None if launched else spec.language_model,
        )
        check_server(info, spec, self._policy, target_names(spec, self.layout))
        self.max_context = min(self.max_context, _context_of(info, self.max_context))
        self.features = features
        self.ranks = int(info.get("tp_size") or 1)
        self.schedules_by_priority = bool(info.get("enable_priority_scheduling"))
        self.frees_memory = features.memory and bool(info.get("enable_memory_saver"))
        self.near = launched or httpx.URL(client.url).host in ("127.0.0.1", "localhost", "[::1]")
        loader = choose_loader(
            spec.engine.update,
            features,
            DiskLoader(self._directory / "weights", config),
            ranks=self.ranks,
            launched=launched,
            near=self.near,
            policy=self._policy,
        )
        keep = spec.engine.in_flight == "keep"
        self.updater = Updater(
            client, features, loader, spec.language_model, self.layout, self._policy, keep=keep
        )


def _context_of(info: dict[str, Any], default: int) -> int:
    """Tokens of prompt and response that the server takes."""
    context = info.get("context_length")
    return int(context) if context else default

"""The server behind an engine: brought up, looked over, taken down."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.models import load_config, skeleton, stop_ids
from services.rollout.engines.sglang import launch
from services.rollout.engines.sglang.client import (
    BrokenReply,
    Features,
    Refused,
    ServerGone,
    SglangClient,
)
from services.rollout.engines.sglang.loading import DiskLoader, Loader, TensorLoader, Updates
from services.rollout.engines.sglang.process import ServerProcess, free_port
from services.rollout.engines.sglang.scratch import ScratchDirectory
from services.rollout.engines.sglang.update import Updater
from troupe.job import PolicySpec

_POLL_SECONDS: Final = 0.25


class Server:
    """One server and what is known of it. After `up` the attributes without underscore are set."""

    client: SglangClient
    updater: Updater
    layout: PreTrainedModel
    """The policy's model without storage: names, shapes and dtypes of its weights."""
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]

    def __init__(
        self,
        policy: str,
        spec: PolicySpec,
        *,
        replica: int,
        work_dir: Path | None,
        updates: Updates,
        deterministic: bool,
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._replica = replica
        self._given_dir = work_dir
        self._scratch: ScratchDirectory | None = None
        self._updates: Updates = updates
        self._deterministic = deterministic
        self._process: ServerProcess | None = None
        self._features: Features | None = None

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
                url = self._attached_url() or await self._launched_url(config)
                self.client = SglangClient(url)
                await self._ready()
                await self._look_over(config)
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
        if for_good and self._scratch is not None:
            await asyncio.to_thread(self._scratch.remove)
            self._scratch = None

    async def waiting(self) -> int:
        """Requests in the server's own queue; 0 where it does not tell."""
        if self._features is None or self._features.loads is None:
            return 0
        return await self.client.waiting(self._features.loads)

    @property
    def _directory(self) -> Path:
        if self._given_dir is not None:
            return self._given_dir
        if self._scratch is None:
            self._scratch = ScratchDirectory()
        return self._scratch.path

    def _read_model(self) -> PretrainedConfig:
        model = self._spec.model
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
        return urls[self._replica] if urls else None

    async def _launched_url(self, config: PretrainedConfig) -> str:
        spec = self._spec
        source = spec.model.path
        if source is None:
            architecture = type(self.layout).__name__
            directory = launch.write_config(config, architecture, self._directory / "model")
            source = str(directory)
        port = free_port()
        command = launch.command(
            spec, source, port, self.max_context, deterministic=self._deterministic
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
        # A rollout process that died in the middle of an update leaves the server paused.
        for mend in (self.client.end_update, self.client.resume):
            with contextlib.suppress(Refused):
                await mend()
        while not await self.client.healthy():
            if self.exited is not None:
                raise self._unlaunchable(self.exited)
            await asyncio.sleep(_POLL_SECONDS)

    async def _look_over(self, config: PretrainedConfig) -> None:
        """Find out what it can do, and whether it is the policy's model at all."""
        where = f"policies.{self._policy}.engine.urls"
        try:
            features = await self._read_features()
            info = await self.client.server_info()
            model_type = (await self.client.model_info()).get("model_type")
        except (ServerGone, BrokenReply, Refused) as error:
            raise EngineStartFailed(
                f"this is no usable SGLang server: {error}",
                field=where,
                value=self.client.url,
                remedy="Give the address of an SGLang server, 0.4.6 or later.",
            ) from error
        if info.get("dp_size", 1) != 1:
            raise EngineStartFailed(
                "its weights cannot be updated: it runs data-parallel",
                field=where,
                value=self.client.url,
                remedy="Run one server per replica, with --dp-size 1.",
            )
        if self._deterministic and not info.get("enable_deterministic_inference"):
            raise EngineStartFailed(
                "it was not started for deterministic inference, which `pipeline.deterministic` "
                "asks for",
                field=where,
                value=self.client.url,
                remedy=f"Start it with {launch.DETERMINISTIC} (releases from 0.5.3).",
            )
        if model_type is not None and model_type != config.model_type:
            raise EngineStartFailed(
                f"it serves a '{model_type}', the policy is a '{config.model_type}'",
                field=where,
                value=self.client.url,
                remedy="Start it with the policy's model.",
            )
        self.max_context = min(self.max_context, _context_of(info, self.max_context))
        self._features = features
        loader = self._loader(config, features, info)
        self.updater = Updater(
            self.client, features, loader, self._spec.model, config, self._policy
        )

    async def _read_features(self) -> Features:
        try:
            return await self.client.features()
        except Refused:  # served without its documentation: assume the oldest
            return Features.of({})

    def _loader(self, config: PretrainedConfig, features: Features, info: dict[str, Any]) -> Loader:
        if self._updates == "tensor":
            return TensorLoader(int(info.get("tp_size") or 1), features.sessions)
        return DiskLoader(self._directory / "weights", config)


def _context_of(info: dict[str, Any], default: int) -> int:
    """Tokens of prompt and response that the server takes."""
    context = info.get("context_length")
    return int(context) if context else default

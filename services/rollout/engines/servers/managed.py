"""The server behind an engine: launched or attached, inspected, probed, ended."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.server_process import (
    EngineDevices,
    ServerProcess,
    claim_url,
    free_port,
    release_urls,
)
from services.rollout.engines.servers.direct import DirectLoader, DirectWay
from services.rollout.engines.servers.interface import (
    SERVER_ERRORS,
    AdapterLimits,
    AdapterNeeds,
    InferenceServer,
    Launch,
    ServerDescription,
    ServerLoad,
    Unfit,
)
from services.rollout.engines.servers.loaders import DirectoryLoader, choose_loader
from services.rollout.engines.servers.update import UNNAMED, Updater
from services.rollout.engines.weights import load_config, skeleton
from troupe.checkpoints.adapters import linear_layers
from troupe.devices import find_devices
from troupe.disks import Scratch
from troupe.doctor.interpreters import Environment, NoEnvironment, read_environment
from troupe.job import LoraSpec, ModelSpec, PolicySpec
from troupe.job.engines import KINDS
from troupe.mixtures import RoutingShape, shape_in
from troupe.rpc.addresses import host_of, http_url, is_loopback_host
from troupe.scheduling.defaults import context_of
from troupe.workflow.languages import end_ids, positions_of

# Letters, digits, white space and signs beyond ASCII: tokenizers that agree on it are taken as
# equal.
_TEXT: Final = "Troupe: 3 agents, x = 17.5 + y\n\tcaf\u00e9 \u2192 \u4e2d\u6587 isn't it?"
# A server that has answered no turn for this long is asked for a real token: when it is idle, and
# when it has room but ends no turn.
PROBE_AFTER_SECONDS: Final = 15.0
STALL_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.25
# A server is idle within this time after its turns were aborted.
_IDLE_SECONDS: Final = 10.0
# Launches until one gets its port before another process does.
_PORTS_TRIED: Final = 3


class _ForeignServer(Exception):
    """Another process answers on the port of a launched server."""


class ManagedServer:
    """Launched or attached server under engines of one or several policies. Attributes without
    underscore are set by `up`."""

    api: InferenceServer
    updater: Updater
    layout: PreTrainedModel
    """The policies' model without storage: names, shapes and dtypes of its weights."""
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    described: ServerDescription

    def __init__(
        self,
        server_class: type[InferenceServer],
        host_id: str,
        specs: Mapping[str, PolicySpec],
        *,
        replica: int,
        deterministic: bool,
        devices: EngineDevices,
        routed_experts: bool = False,
    ) -> None:
        """`specs`: of the policies that it serves, by name; they have one model, and `engine`
        sections that are alike."""
        self._server_class = server_class
        self._host_id = host_id
        self.devices = devices
        # The first one speaks for all.
        self._policy, self._spec = next(iter(specs.items()))
        self._loras = {name: spec.lora for name, spec in specs.items() if spec.lora is not None}
        self._replica = replica
        self._scratch: Scratch | None = None
        self._deterministic = deterministic
        self._routed_experts = routed_experts
        # Whether another worker keeps the server: it may be paused on purpose.
        self.followed = False
        # How the model's routers choose, if turns say which experts they used.
        self.routing: RoutingShape | None = None
        self._process: ServerProcess | None = None
        # Direct ways of weights that this server, or one before it, has refused or died of.
        self._refused_ways: set[DirectWay] = set()
        # Packages of a launched server.
        self.environment: Environment | None = None
        # UUIDs of the GPUs that a launched server sees.
        self._visible: set[str] = set()
        # Served model name of a launched server, so that no other one is mistaken for it.
        self._name = ""

    @property
    def launched(self) -> bool:
        """Whether the server was launched here, and is ended here."""
        return not self._spec.engine.urls

    @property
    def exited(self) -> str | None:
        """How a launched server ended; None while it runs, and for attached servers."""
        process = self._process
        if process is None:
            return None
        process.trim_log()  # looked at as often as this
        if process.running:
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
                    self.api = self._server_class(url)
                    try:
                        await self._ready()
                        await self._inspect(config)
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
        """End a launched server and the connections; `for_good` also deletes log and files."""
        if hasattr(self, "api"):
            await self.api.close()
        if self._process is not None:
            await self._process.stop()
            self._process = None
        release_urls(self)
        if for_good:
            self.devices.release(self._host_id)
        if for_good and self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)
            self._scratch = None

    async def free(self, tags: Collection[str]) -> None:
        """Release memory once the server is idle: a busy scheduler would die of it."""
        async with asyncio.timeout(_IDLE_SECONDS):
            while (load := await self.api.load()).running or load.waiting:  # noqa: ASYNC110 - a server's
                await asyncio.sleep(_POLL_SECONDS / 5)
        await self.api.release_memory(tags)

    @property
    def _directory(self) -> Path:
        if self._scratch is None:
            self._scratch = Scratch(f"troupe-{self._spec.engine.kind}-")
        return self._scratch.path

    def _read_model(self) -> PretrainedConfig:
        config = load_config(self._spec.language_model, self._policy)
        model = self._spec.language_model.resolved(config)
        self._spec = self._spec.model_copy(update={"model": model})
        with torch.device("meta"):
            self.layout = skeleton(config, model.weight_dtype, self._policy)
        text = config.get_text_config()
        self.routing = shape_in(config) if self._routed_experts else None
        self.max_context = context_of(self._spec.engine.max_context, positions_of(text))
        self.vocabulary = text.vocab_size
        self.eos_ids = end_ids(config, model.path, model.revision)
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
        if not claim_url(url, self):
            raise EngineStartFailed(
                "another engine of this worker is attached to that server",
                field=f"policies.{self._policy}.engine.urls",
                value=url,
                remedy="Give each engine a server of its own; release the job that has this one.",
            )
        return url

    async def _launched_url(self, config: PretrainedConfig) -> str:
        spec = self._spec
        environment = self.environment = await self._read_environment()
        source = spec.language_model.path
        if source is None:
            architecture = type(self.layout).__name__
            directory = write_config(config, architecture, self._directory / "model")
            source = str(directory)
        port = free_port()
        self._name = f"troupe-{secrets.token_hex(6)}"
        devices = self.devices.assign(self._host_id, self._policy, spec.engine.tensor_parallel)
        seen = find_devices() if devices is None else devices
        self._visible = {one.uuid for one in seen}
        launch = Launch(
            spec,
            source,
            port,
            self.max_context,
            name=self._name,
            adapters=self.adapter_needs,
            replica=self._replica,
            deterministic=self._deterministic,
            memory=bool(spec.colocate and devices),
            routed_experts=self.routing is not None,
            release=environment.release(KINDS[spec.engine.kind].package),
            gpu=bool(seen),
        )
        process = ServerProcess(
            self._server_class.command(launch),
            self._directory / "server.log",
            devices,
            environment=self._server_class.variables(launch),
        )
        try:
            await process.start()
        except OSError as error:
            raise self._unlaunchable(f"the server cannot be started: {error}") from error
        self._process = process
        return http_url("127.0.0.1", port)

    async def _read_environment(self) -> Environment:
        """Return what the environment of a server to be launched has. Raises `EngineStartFailed` if
        it has no server."""
        engine = self._spec.engine
        kind = KINDS[engine.kind]
        try:
            found = await read_environment(kind.interpreter(engine.python))
        except NoEnvironment as error:
            raise self._unlaunchable(str(error)) from error
        if kind.package not in found.packages:
            product = self._server_class.product
            raise self._unlaunchable(f"{found.interpreter} has no {product}")
        return found

    def _unlaunchable(self, reason: str) -> EngineStartFailed:
        product = self._server_class.product
        kind = KINDS[self._spec.engine.kind]
        return EngineStartFailed(
            reason,
            field=f"policies.{self._policy}.engine.python",
            value=self._spec.engine.python,
            remedy=f"Install {product} in an environment of its own on this host ({kind.install}; "
            f"docs/gpus.md) and name its Python, here or in {kind.python_variable} of the rollout "
            "workers; or give `urls`, or use `kind: embedded`.",
        )

    async def _ready(self) -> None:
        while not await self.api.alive():
            if self.exited is not None:
                raise self._unlaunchable(self.exited)
            await asyncio.sleep(_POLL_SECONDS)
        if self.launched:
            await self._check_name()
        elif not self.followed:
            # A rollout process that died in the middle of an update leaves the server paused, with
            # parts of two versions: workers that follow it must not take them for either.
            unnamed = partial(self.api.set_version, UNNAMED)
            for repair in (self.api.end_update, unnamed, self.api.resume):
                with contextlib.suppress(*SERVER_ERRORS):  # it is asked for more
                    await repair()
        while not self.followed and not await self.api.healthy():
            if self.exited is not None:
                raise self._unlaunchable(self.exited)
            await asyncio.sleep(_POLL_SECONDS)

    async def _check_name(self) -> None:
        """Raise `_ForeignServer` when another server answers on the port."""
        if self._server_class.name_option in self._spec.engine.launch:
            return
        with contextlib.suppress(*SERVER_ERRORS):
            name = await self.api.served_name()
            if name is not None and name != self._name:
                port = urlsplit(self.api.url).port
                raise _ForeignServer(f"port {port} is held by another server, '{name}'")

    def _targets(self, lora: LoraSpec) -> set[str]:
        """Return the last parts of the names of the layers that an adapter changes."""
        layers, _ = linear_layers(self.layout, lora.target_modules)
        return {name.rpartition(".")[2] for name in layers}

    @property
    def adapter_needs(self) -> AdapterNeeds | None:
        """Adapters of the policies; None if none trains one."""
        if not self._loras:
            return None
        modules = {part for lora in self._loras.values() for part in self._targets(lora)}
        rank = max(lora.rank for lora in self._loras.values())
        return AdapterNeeds(rank, sorted(modules), len(self._loras))

    @property
    def adapter_arguments(self) -> str:
        """Arguments that a server of the policies' adapters is started with."""
        needs = self.adapter_needs
        assert needs is not None
        return " ".join(self._server_class.adapter_arguments(needs))

    @property
    def adapter_slots(self) -> int | None:
        """How many adapters the server may hold; None: any number."""
        limits = self.described.adapters
        if limits is None or limits.slots is None:
            return None
        # Of one policy, a new version is loaded while the former one serves.
        return max(limits.slots, len(self._loras) + 1)

    async def _inspect(self, config: PretrainedConfig) -> None:
        """Read what the server can do, and check that it serves the policy's model."""
        spec, api, launched = self._spec, self.api, self.launched
        tokenizer = None if launched else spec.language_model
        described = await inspect(
            api, self._policy, config, deterministic=self._deterministic, tokenizer=tokenizer
        )
        if self.routing is not None and not described.routed_experts:
            raise EngineStartFailed(
                "the job replays routed experts in the trainer, and the server was not started to "
                "return them",
                field="algorithm.router_replay",
                value=True,
                remedy=f"Start it with {api.options['routed_experts']}, or turn it off.",
            )
        self._check_adapters(described)
        self.max_context = min(self.max_context, described.context or self.max_context)
        if self.followed and not described.pauses:
            raise EngineStartFailed(
                "several rollout workers share the server, and its release cannot be paused while "
                "one of them loads weights",
                field=f"policies.{self._policy}.engine.urls",
                value=api.url,
                remedy=f"Use a newer release of {api.product}, or one rollout worker.",
            )
        self.described = described
        near = launched or is_loopback_host(host_of(api.url))
        loader = choose_loader(
            spec.engine.update,
            described,
            DirectoryLoader(self._directory / "weights", config),
            launched=launched,
            near=near,
            policy=self._policy,
        )
        loader = DirectLoader(
            loader,
            api,
            described,
            spec.engine.update,
            near=near,
            visible=self._visible if launched else None,
            environment=self.environment,
            refused=self._refused_ways,
        )
        if spec.engine.cache == "keep" and not described.keeps_cache:
            raise EngineStartFailed(
                "the server cannot keep the cache of running turns apart from other turns' cache",
                field=f"policies.{self._policy}.engine.cache",
                value="keep",
                remedy="Use `recompute`, or a newer release.",
            )
        self.updater = Updater(
            api,
            described,
            loader,
            config,
            self.max_context,
            keep=spec.engine.in_flight == "keep",
            keep_cache=spec.engine.cache == "keep",
        )

    def _check_adapters(self, described: ServerDescription) -> None:
        """Raise `EngineStartFailed` unless the server was started for the policies' adapters."""
        remedy = f"Start it with {self.adapter_arguments}." if self._loras else ""
        for policy, lora in self._loras.items():
            if problem := self._lacks(described.adapters, lora):
                raise self._unfit(policy, problem, remedy)
        if not self._loras:
            return
        policy = next(iter(self._loras))
        if not described.takes_adapters:
            option = self.api.options["adapters"]
            raise self._unfit(policy, "it loads none while it runs", f"Start it with {option}.")
        slots = described.adapters.slots if described.adapters is not None else None
        # One each, and one more to bring a policy to its next version.
        if slots is not None and slots <= len(self._loras) > 1:
            option = self.api.options["slots"]
            problem = f"it holds {slots} adapters, {len(self._loras)} policies share it"
            raise self._unfit(policy, problem, f"{remedy} Too small is {option}.")

    def _lacks(self, limits: AdapterLimits | None, lora: LoraSpec) -> str:
        """Return why a server cannot serve an adapter; empty if it can."""
        if limits is None:
            return "it was started without LoRA"
        if limits.rank is not None and limits.rank < lora.rank:
            return f"it takes adapters up to rank {limits.rank}, the policy's have {lora.rank}"
        lacking = sorted(self._targets(lora) - set(limits.modules)) if limits.modules else []
        return f"it adapts no {', '.join(lacking)}" if lacking else ""

    def _unfit(self, policy: str, problem: str, remedy: str) -> EngineStartFailed:
        engine = self._spec.engine
        return EngineStartFailed(
            f"the policy trains an adapter, and the server cannot serve it: {problem}",
            field=f"policies.{policy}.engine.{'urls' if engine.urls else 'launch'}",
            value=", ".join(engine.urls or engine.launch) or None,
            remedy=remedy,
        )


class Health:
    """Health probes of one server. `max_running`: turns that it runs at once."""

    def __init__(self, api: InferenceServer, max_running: int) -> None:
        self._api = api
        self._max_running = max_running
        self._answered_at = time.monotonic()

    async def generates(
        self, answered: int, in_flight: int, load: ServerLoad, *, serves: bool
    ) -> bool:
        """Whether the server generates. `answered`: turns since the last probe; one is proof
        enough.

        A busy server may report that it is healthy at any sign of life, and a page in front of a
        dead one may answer anything. So an ordinary request is sent when the server is idle, or
        when it has room and still ends no turn. `in_flight`: its current turns of this worker;
        `load`: its own report, which counts all workers' turns.
        """
        if answered:
            self._answered_at = time.monotonic()
            return True
        if not await self._api.healthy():
            return False
        silent = time.monotonic() - self._answered_at
        # In a full server, or behind prompts that wait to be read, a probe may take long: no fault.
        turns = max(in_flight, load.running)
        room = turns < self._max_running and not load.waiting
        patience = STALL_SECONDS if turns else PROBE_AFTER_SECONDS
        if not (room and silent > patience and serves):
            return True
        if not await self._api.probe():
            return False
        self._answered_at = time.monotonic()
        return True


def write_config(config: PretrainedConfig, architecture: str, directory: Path) -> Path:
    """Write the directory of a model without weights, as servers read it."""
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


async def inspect(
    api: InferenceServer,
    policy: str,
    config: PretrainedConfig,
    *,
    deterministic: bool,
    tokenizer: ModelSpec | None = None,
) -> ServerDescription:
    """The server's description of itself.

    Raises `EngineStartFailed` naming `engine.urls` when it is another kind of server, cannot be
    updated, or serves another model than `config`: another type, another vocabulary or, where
    `tokenizer` is given and the server has one, another tokenizer.
    """

    def refused(reason: str, remedy: str) -> EngineStartFailed:
        return EngineStartFailed(
            reason, field=f"policies.{policy}.engine.urls", value=api.url, remedy=remedy
        )

    product = api.product
    try:
        described = await api.describe()
        theirs = await api.tokenize(_TEXT) if tokenizer else None
    except Unfit as error:
        raise refused(error.reason, error.remedy) from error
    except SERVER_ERRORS as error:
        raise refused(
            f"this is no usable {product} server: {error}",
            f"Give the address of a server of {product} {api.oldest} or later.",
        ) from error
    if deterministic and not described.deterministic:
        raise refused(
            "it was not started for deterministic inference, which `pipeline.deterministic` "
            "asks for",
            f"Start it with {api.options['deterministic']}.",
        )
    model_type, vocabulary = described.model_type, described.vocabulary
    if model_type is not None and model_type != config.model_type:
        raise refused(
            f"it serves a '{model_type}', the policy is a '{config.model_type}'",
            "Start it with the policy's model.",
        )
    ours = config.get_text_config().vocab_size
    if vocabulary is not None and vocabulary != ours:
        raise refused(
            f"it has a vocabulary of {vocabulary} tokens, the policy one of {ours}",
            "Start it with the policy's model.",
        )
    if theirs is not None and tokenizer is not None:
        expected = await asyncio.to_thread(_ids, tokenizer)
        if expected is not None and theirs != expected:
            raise refused(
                "it has another tokenizer than the policy: the same text gives other ids",
                "Start it with the policy's model and tokenizer.",
            )
    return described


def _ids(model: ModelSpec) -> list[int] | None:
    """Ids of `_TEXT` by the policy's tokenizer; None when it cannot be loaded here."""
    try:
        loaded = AutoTokenizer.from_pretrained(model.tokenizer_source, revision=model.revision)
    except (OSError, ValueError):
        return None
    ids: list[int] = loaded.encode(_TEXT, add_special_tokens=False)
    return ids

"""Preparation of a job: loads its code, checks it, and starts its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from services.chassis.model_files import ModelFiles
from services.rollout.engines.base import ServingEngine
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import DeviceSpeed
from services.rollout.garbage import exempt_new
from services.rollout.prepared_job import PreparedJob
from services.rollout.program import JobProgram
from services.rollout.rewards import JobFunctions
from services.rollout.serving.engine_moves import EngineMoves
from services.rollout.serving.policy import ServedPolicy
from services.rollout.trajectories.concurrency import ConcurrencyGate
from services.rollout.workflow_program import WorkflowProgram
from troupe.functions.shipped import open_shipped, using
from troupe.functions.sources import SourceStore
from troupe.job import JobSpec, JobSpecError, PolicySpec, SimulatedSpec, parse_job_in_thread
from troupe.job.engines.sharing import engine_groups
from troupe.job.sections.balancing import engine_count
from troupe.rpc.errors import InvalidArgument
from troupe.scheduling.defaults import CPU, defaults_of, described_device
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

if TYPE_CHECKING:
    from troupe.v1.orchestrator_pb2_grpc import OrchestratorAsyncStub
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

log = structlog.get_logger(__name__)

# Makes what engines stand on: (host_id, specs by policy, *, replica, deterministic,
# routed_experts).
HostFactory = Callable[..., EngineHost]


def devices_of(policy: PolicySpec, own: DeviceSpeed) -> list[DeviceSpeed]:
    """Return one device per engine of the policy on this worker, in order of their replica numbers.

    These are the devices of `engine.pools` if there are pools, else `own`, this worker's, for every
    engine.
    """
    engine = policy.engine
    if not engine.pools:
        devices = [own] * engine_count(policy)
    else:
        devices = [
            DeviceSpeed(
                pool.device_class,
                pool.prefill_tokens_per_second or 0.0,
                pool.decode_tokens_per_second or 0.0,
            )
            for pool in engine.pools
            for _ in range(pool.replicas)
        ]
    if policy.simulated is None:
        return devices
    simulated = policy.simulated
    return [
        device if device.is_measured else _modelled(device, simulated, engine.running_limit)
        for device in devices
    ]


def with_defaults(spec: JobSpec, gpu: int | None, *, embedded: bool) -> JobSpec:
    """Return the job with the defaults that depend on the devices of its engines.

    `gpu`: bytes of this worker's smallest GPU, since its engines may be on any GPU; 0: unknown,
    None: it has no GPU. `embedded`: whether embedded engines compute there. Attached servers count
    as GPUs.
    """
    policies = dict(spec.policies)
    turn_seconds = CPU.turn_seconds
    for name, policy in spec.policies.items():
        if policy.model is None or policy.simulated is not None:
            continue
        engine = policy.engine
        own = defaults_of(_memory_behind(policy, gpu, embedded=embedded))
        turn_seconds = max(turn_seconds, own.turn_seconds)
        running = engine.max_running or own.max_running
        engine = engine.model_copy(update={"max_running": running})
        given = {"engine": engine, "colocate": name in spec.colocated}
        policies[name] = policy.model_copy(update=given)
    seconds = spec.limits.turn_seconds or turn_seconds
    limits = spec.limits.model_copy(update={"turn_seconds": seconds})
    return spec.model_copy(update={"policies": policies, "limits": limits})


def _memory_behind(policy: PolicySpec, gpu: int | None, *, embedded: bool) -> int | None:
    """Return the bytes of the devices of a policy's engines; arguments and result as in
    `with_defaults`."""
    if policy.engine.urls:
        return gpu or 0
    return gpu if embedded or policy.engine.is_server else None


def _modelled(device: DeviceSpeed, simulated: SimulatedSpec, running: int) -> DeviceSpeed:
    """Return the device with a simulated engine's rates, which follow from its cost model without
    measurement."""
    pace = simulated.of_class(device.device_class)
    step = pace.decode_seconds + pace.decode_seconds_per_turn * running
    if not device.device_class or not step:
        return device
    return DeviceSpeed(device.device_class, pace.prefill_tokens_per_second, running / step)


def computes_here(spec: JobSpec) -> bool:
    """Return whether the job's engines hold models in this process."""
    return any(
        policy.simulated is None and not policy.engine.is_server
        for policy in spec.policies.values()
    )


class Preparation:
    """Prepares jobs on this worker."""

    def __init__(
        self,
        transfer: Transfer,
        rewards: RewardAsyncStub,
        worker_id: str,
        make_host: HostFactory,
        device: DeviceSpeed,
        threads: int,
        models: ModelFiles,
        sources: SourceStore,
        orchestrator: OrchestratorAsyncStub,
        *,
        gpu: int | None,
        embedded: str,
    ) -> None:
        """Create the preparation. `device`: of engines here, if the job does not name one.
        `threads`: number of threads in which networks play. `sources`: the code of jobs that ship
        it, read from `orchestrator`. `gpu`: bytes of this worker's smallest GPU; None: it has no
        GPU. `embedded`: device of embedded engines, "cpu", "cuda" or "auto"."""
        self._transfer = transfer
        self._rewards = rewards
        self._worker_id = worker_id
        self._make_host = make_host
        self._device = device
        self._threads = threads
        self._models = models
        self._sources, self._orchestrator = sources, orchestrator
        self._gpu, self._embedded = gpu, embedded
        # Whether embedded engines compute on a GPU.
        self._on_gpu = False

    async def with_defaults(self, spec: JobSpec) -> JobSpec:
        """Return the job with this host's models and this worker's defaults; see the function."""
        spec = await self._models.localized(spec, self._orchestrator)
        on_gpu = False
        if self._gpu is not None and self._embedded != "cpu":
            # In a thread: torch takes seconds to import.
            on_gpu = await asyncio.to_thread(_torch_sees_gpu)
        self._on_gpu = on_gpu
        return with_defaults(spec, self._gpu, embedded=on_gpu)

    def resolved(self, given: JobSpec, job: PreparedJob) -> list[common_pb.ResolvedSetting]:
        """Return the resolved settings that the job as `given` may leave open: the value on this
        worker, and its source."""
        found: list[common_pb.ResolvedSetting] = []

        def add(field: str, asked: object, value: object, source: str) -> None:
            source = source if asked is None else "given"
            found.append(common_pb.ResolvedSetting(field=field, value=str(value), source=source))

        seconds, slowest = job.spec.limits.turn_limit, described_device(None)
        for name, policy in given.policies.items():
            if policy.model is None or policy.simulated is not None:
                continue
            memory = _memory_behind(policy, self._gpu, embedded=self._on_gpu)
            device, field = described_device(memory), f"policies.{name}.engine"
            if defaults_of(memory).turn_seconds == seconds:
                slowest = device
            running = job.spec.policies[name].engine.max_running
            add(f"{field}.max_running", policy.engine.max_running, running, device)
            if context := job.policies[name].max_context:
                own = job.policies[name].language.positions
                bound = f"bound of {policy.engine.kind} engines"
                source = "checkpoint" if context == own else bound
                add(f"{field}.max_context", policy.engine.max_context, context, source)
        if found:
            add("limits.turn_seconds", given.limits.turn_seconds, f"{seconds:g}", slowest)
        return found

    async def make(
        self,
        job_id: str,
        spec: JobSpec,
        refs: Mapping[str, common_pb.WeightsRef],
        servers: Sequence[rollout_pb.SharedServer] = (),
    ) -> PreparedJob:
        """Return a job whose engines serve `refs`. `servers`: attached servers that other workers
        may also use.

        Raises `TroupeError` naming the job's field at fault, or the error of an engine that does
        not start; then nothing keeps running.
        """
        # Quick checks first: an engine may take minutes to start.
        code = None
        if spec.code is not None and (sha256 := spec.code.sha256):
            folder = await self._sources.fetch(sha256, self._orchestrator)
            code = await asyncio.to_thread(open_shipped, sha256, folder)
        with using(code):
            program = await self._open_program(spec)
            try:
                return await self._make(job_id, program, refs, servers)
            except BaseException:
                await asyncio.to_thread(program.close)
                raise

    async def _make(
        self,
        job_id: str,
        program: JobProgram,
        refs: Mapping[str, common_pb.WeightsRef],
        servers: Sequence[rollout_pb.SharedServer],
    ) -> PreparedJob:
        spec = program.spec
        functions = JobFunctions(self._rewards, job_id, spec, self._sources)
        await functions.announce()
        policies = {}
        for name, policy in spec.policies.items():
            # In a thread: importing an engine's libraries takes seconds.
            engines = await asyncio.to_thread(self._engines, job_id, name, program)
            policies[name] = ServedPolicy(
                name,
                program.languages.get(name),
                engines,
                self._transfer,
                policy.engine,
                refs[name],
                routing=spec.routing,
                # Whether a turn may combine tokens of several engines: not in deterministic jobs,
                # and not if one version must draw all of it, since the next engine may have
                # another.
                resume=policy.engine.in_flight == "keep" and not spec.pipeline.deterministic,
                overlapping=spec.pipeline.mode == "async",
            )
        share_servers(job_id, self._worker_id, policies, servers)
        try:
            outcomes = await asyncio.gather(
                *(policy.bring_up() for policy in policies.values()), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:  # also a cancelled preparation leaves no engine running
            await asyncio.gather(*(p.release("preparation failed") for p in policies.values()))
            raise
        if computes_here(spec):
            exempt_new()
        log.info(
            "job prepared",
            job_id=job_id,
            # With the defaults of this worker's devices.
            max_running={name: spec.policies[name].engine.max_running for name in policies},
            turn_seconds=spec.limits.turn_seconds,
        )
        return PreparedJob(
            job_id=job_id,
            spec=spec,
            program=program,
            functions=functions,
            policies=policies,
            gate=ConcurrencyGate(
                program.most_trajectories,
                one_query=spec.pipeline.mode == "serial",
            ),
            moves=EngineMoves(spec, policies, program.make_engine),
            transfer=self._transfer,
        )

    async def _open_program(self, spec: JobSpec) -> JobProgram:
        """Return what the job's trajectories run. Raises `InvalidArgument` naming the field at
        fault."""
        if spec.environment is None:
            hosts = JobHosts(spec, self._worker_id, self._make_host, self._device)
            return await WorkflowProgram.open(spec, hosts.engine)
        return await asyncio.to_thread(_open_environment, spec, self._threads)

    def _engines(self, job_id: str, name: str, program: JobProgram) -> list[ServingEngine]:
        return [
            program.make_engine(engine_id_of(job_id, name, number, self._worker_id), name)
            for number in range(engine_count(program.spec.policies[name]))
        ]


class JobHosts:
    """The engine hosts of one job's language models on this worker."""

    def __init__(
        self, spec: JobSpec, worker_id: str, make: HostFactory, device: DeviceSpeed
    ) -> None:
        """`device`: of engines here, if the job does not name one."""
        self._spec, self._worker_id = spec, worker_id
        self._make = make
        self._device = device
        self._groups = {name: one for one in engine_groups(spec) for name in one.policies}
        # Hosts of groups, by their ids.
        self._shared: dict[str, EngineHost] = {}

    def engine(self, engine_id: str, name: str) -> ServingEngine:
        """Return an engine for a policy, not started."""
        job, first, number = engine_id.removesuffix(f"@{self._worker_id}").rsplit(".", 2)
        if (group := self._groups.get(name)) is None:
            host = self._host(engine_id, [name], int(number))
        else:
            host_id = engine_id_of(job, group.name, int(number), self._worker_id)
            if host_id not in self._shared:
                self._shared[host_id] = self._host(host_id, group.policies, int(number))
            host = self._shared[host_id]
        engine: ServingEngine = host.engine(engine_id, name)
        # It stays on its device, which its first policy determined.
        engine.device = devices_of(self._spec.policies[first], self._device)[int(number)]
        return engine

    def _host(self, host_id: str, names: Sequence[str], number: int) -> EngineHost:
        spec = self._spec
        specs = {name: spec.policies[name] for name in names}
        trained = any(policy.trainable for policy in specs.values())
        return self._make(
            host_id,
            specs,
            replica=number,
            deterministic=spec.pipeline.deterministic,
            routed_experts=spec.algorithm.router_replay and trained,
        )


def engine_id_of(job_id: str, policy: str, number: int, worker_id: str) -> str:
    """Return the id of a policy's engine `number` on a worker."""
    return f"{job_id}.{policy}.{number}@{worker_id}"


def share_servers(
    job_id: str,
    worker_id: str,
    policies: Mapping[str, ServedPolicy],
    servers: Sequence[rollout_pb.SharedServer],
) -> None:
    """Keep or follow the engines of attached servers, as the orchestrator decides."""
    for server in servers:
        if (policy := policies.get(server.policy)) is not None:
            policy.share(engine_id_of(job_id, server.policy, server.replica, worker_id), server)


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _open_environment(spec: JobSpec, places: int) -> JobProgram:
    # Imported here: few jobs have networks, and torch takes seconds to import.
    from services.rollout.networks.program import NetworkProgram

    return NetworkProgram.open(spec, places)


async def parse_spec(spec_json: str) -> JobSpec:
    """Return the specification in a request. Raises `InvalidArgument` naming its first fault."""
    try:
        return await parse_job_in_thread(spec_json)
    except JobSpecError as error:
        first = error.problems[0]
        raise InvalidArgument(
            first.message, field=first.field, value=first.value, remedy=first.remedy
        ) from error


def by_policy(
    spec: JobSpec, weights: Sequence[common_pb.WeightsRef]
) -> dict[str, common_pb.WeightsRef]:
    """Return one reference per policy of the job. Raises `InvalidArgument` when one is missing."""
    refs = {ref.policy: ref for ref in weights}
    for name in spec.policies:
        if name not in refs:
            raise InvalidArgument(
                f"no weights are given for policy '{name}'",
                field="weights",
                remedy="Give one reference per policy, including frozen ones.",
            )
    return {name: refs[name] for name in spec.policies}

"""Other hosts that run calls: attached, used, killed in the middle, back again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from services.chassis.app import serve
from services.chassis.telemetry import Telemetry
from services.reward.host import FunctionHost
from services.reward.hosts.agent import HostAgent, RewardHost
from services.reward.hosts.link import HostFleet, HostLink
from services.reward.runtime import Runtime
from services.reward.server import RewardService
from services.reward.settings import RewardSettings
from tests.support.needs import BUBBLEWRAP
from tests.support.waiting import PATIENCE, until
from troupe.functions.sources import SourceStore
from troupe.rpc import NO_RETRY, InvalidArgument, Unavailable, connect, new_id
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1.reward_pb2_grpc import RewardStub

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

Kind = reward_pb.InvocationError
HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Service:
    """A reward service without its own workers, and calls to it."""

    def __init__(self, stub: RewardAsyncStub, address: str) -> None:
        self.stub, self.address = stub, address

    async def register(self, name: str, **fields: Any) -> reward_pb.FunctionSpec:
        fields = {"entrypoint": f"reward_functions:{name}", "timeout_seconds": PATIENCE, **fields}
        spec = reward_pb.FunctionSpec(
            name=name, version=fields.pop("version", str(fields)), **fields
        )
        await self.stub.RegisterFunction(
            reward_pb.RegisterFunctionRequest(request_id=new_id(), function=spec)
        )
        return spec

    async def invoke(
        self, spec: reward_pb.FunctionSpec, arguments: dict[str, Any] | None = None, **fields: Any
    ) -> reward_pb.InvokeResponse:
        timeout = fields.pop("timeout", 60)
        request = reward_pb.InvokeRequest(
            invocation_id=fields.pop("invocation_id", new_id()),
            name=spec.name,
            version=spec.version,
            arguments_json=json.dumps(arguments or {}),
            **fields,
        )
        return await self.stub.Invoke(request, timeout=timeout)

    async def hosts(self) -> dict[str, reward_pb.HostStatus]:
        response = await self.stub.ListHosts(reward_pb.ListHostsRequest())
        return {status.offer.host_id: status for status in response.hosts}

    async def until(self, condition: Callable[[dict[str, reward_pb.HostStatus]], bool]) -> None:
        async def holds() -> bool:
            return condition(await self.hosts())

        await until(holds)

    @asynccontextmanager
    async def host(self, name: str, **settings: Any) -> AsyncIterator[None]:
        """One more host, in this process."""
        made = RewardSettings(
            reward_address=self.address,
            worker_id=name,
            reward_min_workers=0,
            **{"reward_workers": 2, "drain_seconds": 5, **settings},
        )
        async with serve(RewardHost, made):
            await self.until(lambda hosts: name in hosts)
            yield
        await self.until(lambda hosts: name not in hosts)

    async def process(self, name: str, **settings: str) -> asyncio.subprocess.Process:
        """One more host, that can be killed."""
        environment = {
            **os.environ,
            "TROUPE_REWARD_ADDRESS": self.address,
            "TROUPE_WORKER_ID": name,
            "TROUPE_REWARD_WORKERS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
            **settings,
        }
        command = (sys.executable, "-m", "services.reward.hosts")
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        await self.until(lambda hosts: name in hosts)
        return process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Service]:
    settings = RewardSettings(
        reward_workers=0,
        reward_host_beat_seconds=0.3,
        reward_host_expected_seconds=0,
        drain_seconds=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        async with (
            serve(RewardService, settings) as server,
            connect(server.address, server.settings.client()) as channel,
        ):
            yield Service(RewardStub(channel), server.address)


async def test_calls_run_where_there_is_room(service: Service) -> None:
    async with service.host("a", reward_workers=1), service.host("b", reward_workers=1):
        spec = await service.register("sleeps")
        answers = await asyncio.gather(
            *(service.invoke(spec, {"seconds": 0.3, "tag": tag}) for tag in "xy")
        )
        assert [json.loads(answer.result_json) for answer in answers] == ["x", "y"]
        assert {answer.host for answer in answers} == {"a", "b"}
        raised = await service.invoke(await service.register("raises"))
        assert raised.error.kind == Kind.KIND_RAISED
        assert "this answer cannot be scored" in raised.error.traceback
        hosts = await service.hosts()
        assert sum(status.invocations for status in hosts.values()) == 3


async def test_a_call_waits_for_a_host_and_many_share_one(service: Service) -> None:
    async with service.host("early"):
        spec = await service.register("score", kind="reward")
    waiting = [
        asyncio.create_task(service.invoke(spec, {"answer": "a", "expected": str(i % 2 and "a")}))
        for i in range(40)
    ]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    async with service.host("late"):
        answers = await asyncio.gather(*waiting)
    assert [json.loads(answer.result_json) for answer in answers] == [0.0, 1.0] * 20
    assert {answer.host for answer in answers} == {"late"}


@pytest.mark.slow
async def test_a_host_killed_in_the_middle_is_said_or_the_call_runs_elsewhere(
    service: Service, tmp_path: Path
) -> None:
    doomed = await service.process("doomed")
    try:
        once = await service.register("sleeps", version="once")
        again = await service.register("sleeps", version="again", retries=1)
        lost = asyncio.create_task(service.invoke(once, {"seconds": 60}))
        await service.until(lambda hosts: hosts["doomed"].running == 1)
        doomed.send_signal(signal.SIGKILL)
        error = (await lost).error
        assert (error.kind, "doomed" in error.message) == (Kind.KIND_WORKER_DIED, True)
        await doomed.wait()

        doomed = await service.process("doomed-too")
        moved = asyncio.create_task(service.invoke(again, {"seconds": 1.0, "tag": "done"}))
        await service.until(lambda hosts: hosts["doomed-too"].running == 1)
        async with service.host("spare"):
            doomed.send_signal(signal.SIGKILL)
            answer = await moved
        assert json.loads(answer.result_json) == "done"
        assert (answer.host, answer.attempts) == ("spare", 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            doomed.kill()
        await doomed.wait()


@pytest.mark.slow
async def test_a_host_that_hangs_is_given_up_and_comes_back(service: Service) -> None:
    process = await service.process("sleeper")
    try:
        spec = await service.register("sleeps")
        lost = asyncio.create_task(service.invoke(spec, {"seconds": 60}))
        await service.until(lambda hosts: hosts["sleeper"].running == 1)
        process.send_signal(signal.SIGSTOP)
        error = (await lost).error
        assert (error.kind, "was silent" in error.message) == (Kind.KIND_WORKER_DIED, True)
        assert "sleeper" not in await service.hosts()
        process.send_signal(signal.SIGCONT)
        await service.until(lambda hosts: "sleeper" in hosts)
        answer = await service.invoke(spec, {"seconds": 0, "tag": "back"})
        assert json.loads(answer.result_json) == "back"
        process.terminate()
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_host_that_leaves_lets_its_calls_end(service: Service) -> None:
    async with service.host("leaver"):
        spec = await service.register("sleeps")
        call = asyncio.create_task(service.invoke(spec, {"seconds": 0.2, "tag": "ended"}))
        await service.until(lambda hosts: hosts["leaver"].running == 1)
    assert json.loads((await call).result_json) == "ended"


async def test_a_command_that_cannot_be_obeyed_costs_one_attachment(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    obey, failed = HostAgent._handle, list[str]()

    def stumble(agent: HostAgent, command: reward_pb.HostCommand) -> None:
        if command.WhichOneof("command") == "run" and not failed:
            failed.append(command.run.run_id)
            raise IndexError("of a call that there is not")
        obey(agent, command)

    monkeypatch.setattr(HostAgent, "_handle", stumble)
    async with service.host("stumbles"):
        score = await service.register("score", retries=2)
        answer = await service.invoke(score, {"answer": "a", "expected": "a"})
        assert json.loads(answer.result_json) == 1.0, answer.error
    assert failed


async def test_a_call_is_cancelled_where_it_runs(service: Service) -> None:
    async with service.host("a"):
        spec = await service.register("sleeps")
        call = asyncio.create_task(service.invoke(spec, {"seconds": 60}, invocation_id="c"))
        await service.until(lambda hosts: hosts["a"].running == 1)
        await service.stub.CancelInvocation(reward_pb.CancelInvocationRequest(invocation_id="c"))
        assert (await call).error.kind == Kind.KIND_CANCELLED


async def test_uploaded_source_goes_to_the_host_once(service: Service) -> None:
    code = b"def double(x: int) -> int:\n    print('seen')\n    return 2 * x\n"
    files = [reward_pb.SourceFile(path="uploaded_here.py", content=code)]
    uploaded = await service.stub.UploadSource(
        reward_pb.UploadSourceRequest(request_id=new_id(), files=files)
    )
    async with service.host("a"):
        spec = await service.register(
            "double", entrypoint="uploaded_here:double", source_sha256=uploaded.sha256
        )
        for x in range(3):
            answer = await service.invoke(spec, {"x": x})
            assert answer.result_json == str(2 * x), answer.error
        request = reward_pb.ReadLogsRequest(name="double")
        printed = [line.text async for line in service.stub.ReadLogs(request)]
        assert printed == ["seen"] * 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cores": 3}, r"function.cores = 3: takes 3 .* of 2 hosts none has more than 2"),
        ({"memory_mib": 4096}, r"takes 4096 of memory_mib, .* more than 1024"),
        ({"model_service": "judge"}, r"takes 1 of model:judge, .* none has more than 0"),
        ({"gpus": 1}, "only models get devices"),
        pytest.param(
            {"stateful": True, "sandbox": "bubblewrap"},
            "on the service's own host",
            marks=BUBBLEWRAP,
        ),
        ({"quota": "api"}, "no quotas are declared"),
    ],
)
async def test_a_cost_that_no_host_can_meet_is_refused_at_once(
    service: Service, fields: dict[str, Any], reason: str
) -> None:
    cores = {"reward_core_backend": "affinity", "reward_memory_mib": 1024}
    async with (
        service.host("one", reward_cores=1, **cores),
        service.host("two", reward_cores=2, **cores),
    ):
        await service.register("score", cores=2, memory_mib=1024)
        with pytest.raises(InvalidArgument, match=reason):
            await service.register("score", **fields)


async def test_a_fresh_service_waits_for_its_hosts() -> None:
    settings = RewardSettings(reward_workers=0, drain_seconds=1)
    async with (
        serve(RewardService, settings) as server,
        connect(server.address, server.settings.client(retry=NO_RETRY)) as channel,
    ):
        fresh = Service(RewardStub(channel), server.address)
        await fresh.register("score", cores=64)
        async with fresh.host("small", reward_cores=1, reward_core_backend="affinity"):
            with pytest.raises(Unavailable, match="others may come"):
                await fresh.register("score", cores=65)


async def test_offers_that_make_no_sense_are_refused(service: Service) -> None:
    for offer, reason in (
        (reward_pb.HostOffer(host_id="x y", workers=1), "offer.host_id"),
        (reward_pb.HostOffer(host_id="x", workers=0), "offer.workers"),
        (reward_pb.HostOffer(host_id="x", workers=1, cores=-1), "offer.cores"),
    ):

        async def messages(
            offer: reward_pb.HostOffer = offer,
        ) -> AsyncIterator[reward_pb.HostMessage]:
            yield reward_pb.HostMessage(offer=offer)
            await asyncio.sleep(60)

        stream = service.stub.AttachHost(messages())
        with pytest.raises(InvalidArgument, match=reason):
            await anext(aiter(stream))


async def test_a_host_that_drains_for_long_leaves_once() -> None:
    """It is forgotten while its calls still run; then it goes."""
    runtime = Runtime([], Telemetry())
    fleet = HostFleet(FunctionHost("", []), runtime.dispatcher, expected_seconds=0)
    spec = reward_pb.FunctionSpec(name="any", timeout_seconds=9)
    sources = SourceStore()
    fleet.attach(HostLink(reward_pb.HostOffer(host_id="drains", workers=1), sources))
    for _ in range(2):
        fleet.detach("drains")
        fleet.check(spec)
    fleet.attach(HostLink(reward_pb.HostOffer(host_id="drains", workers=1), sources))
    fleet.check(spec)
    assert list(runtime.dispatcher.hosts) == ["drains"]
    await runtime.stop()

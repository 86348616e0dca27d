"""Any input to a gRPC port gets a typed status, and the services survive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fuzz.conftest import Target
from tests.fuzz.messages import MessageMaker
from tests.support.waiting import PATIENCE
from troupe.rpc.channel import channel_options
from troupe.rpc.errors import DETAILS_KEY
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import reward_pb2 as reward_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.v1 import trainer_pb2 as trainer_pb
from troupe.v1 import transfer_pb2 as transfer_pb

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("TROUPE_FUZZ_SEED", "1"))
# Total calls to all services; each method gets its share.
SECONDS = float(os.environ.get("TROUPE_FUZZ_SECONDS", "100"))
AT_ONCE = 12
GROWTH_MIB = 400
# gRPC's own statuses for calls that timed out or were cancelled.
MADE_BY_GRPC = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
# Our own side, of a message of a stream that was refused before it.
WRITTEN_TOO_LATE = "Internal error from Core"
FORBIDDEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def services_of(*files: Any, but: str = "") -> list[ServiceDescriptor]:
    """The services of proto files, without the one named `but`."""
    return [one for file in files for one in file.services_by_name.values() if one.name != but]


MODELS = transfer_pb.DESCRIPTOR.services_by_name["HostModels"]
SERVICES = {
    "orchestrator": [*services_of(orchestrator_pb.DESCRIPTOR, reward_pb.DESCRIPTOR), MODELS],
    "experience_store": services_of(store_pb.DESCRIPTOR),
    "reward": services_of(reward_pb.DESCRIPTOR),
    "rollout-0": [*services_of(rollout_pb.DESCRIPTOR), MODELS],
    "trainer-0": [*services_of(trainer_pb.DESCRIPTOR), MODELS],
    "transfer": services_of(transfer_pb.DESCRIPTOR, but=MODELS.name),
}
HEALTH = "/grpc.health.v1.Health/Check"
DELETING = ("ForgetJob", "DropTables")
METADATA = (
    (),
    (("troupe-job-id", "x" * 2000),),
    (("authorization", "Bearer wrong"),),
    (("traceparent", "00-zz-zz-zz"), ("baggage", "a=b,,=;")),
    (("grpc-accept-encoding", "snappy"), ("x-odd-bin", b"\x00\xff")),
    (("troupe-policy", "%00"), ("troupe-policy", "twice")),
)


@dataclass(frozen=True)
class Method:
    """One RPC of one process."""

    process: str
    address: str
    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        """The name on the wire."""
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"


@dataclass
class Answer:
    """How one call ended."""

    code: grpc.StatusCode
    details: str
    typed: bool


def methods_of(target: Target) -> list[Method]:
    """Every RPC of every service of the cluster."""
    addresses = {one.name: one.address for one in target.services}
    addresses["transfer"] = target.owner.local
    return [
        Method(process, addresses[process], method)
        for process, services in SERVICES.items()
        for service in services
        for method in service.methods
    ]


def request_of(method: Method, rng: random.Random, maker: MessageMaker) -> bytes:
    """A message of the method's type three times in four; else bytes of any kind."""
    kind = rng.random()
    made = message_factory.GetMessageClass(method.descriptor.input_type)()
    valid = maker.fill(made).SerializeToString()
    if kind < 0.75:
        return valid
    if kind < 0.85:
        return rng.randbytes(rng.choice((1, 3, 40, 3000)))
    if kind < 0.95 and valid:  # cut off, or with a byte changed
        at = rng.randrange(len(valid))
        return valid[:at] + (b"" if rng.random() < 0.5 else rng.randbytes(1) + valid[at + 1 :])
    return valid * 3


async def call(
    channel: grpc.aio.Channel,
    method: Method,
    body: bytes,
    rng: random.Random,
    authorization: str,
) -> Answer:
    """Call, and give a stream up after some answers."""
    timeout = rng.choice((6.0, 6.0, 6.0, 0.5, 0.01, 0.0))
    metadata = rng.choice(METADATA)
    if "authorization" not in dict(metadata):
        metadata = (*metadata, ("authorization", authorization))
    descriptor = method.descriptor
    if descriptor.client_streaming:
        made = channel.stream_stream(method.path)(timeout=timeout, metadata=metadata)
        with contextlib.suppress(Exception):  # it may have ended before, which reading tells
            for _ in range(rng.choice((0, 1, 2))):
                await made.write(body)
            await made.done_writing()
    elif descriptor.server_streaming:
        made = channel.unary_stream(method.path)(body, timeout=timeout, metadata=metadata)
    else:
        made = channel.unary_unary(method.path)(body, timeout=timeout, metadata=metadata)
    try:
        if descriptor.server_streaming:
            async with asyncio.timeout(1.5):  # deadline: some streams have no end
                number = 0
                async for _ in made:
                    number += 1
                    if number == 20:
                        break
        else:
            await made
    except (TimeoutError, asyncio.CancelledError):  # gRPC's own, of a call that we cancel
        made.cancel()
        return Answer(grpc.StatusCode.CANCELLED, "given up", typed=True)
    except grpc.aio.AioRpcError as error:
        if error.details() == WRITTEN_TOO_LATE:
            return Answer(grpc.StatusCode.CANCELLED, "ended before all was sent", typed=True)
        trailing = dict(error.trailing_metadata() or ())
        typed = False
        with contextlib.suppress(Exception):
            status = status_pb2.Status.FromString(trailing[DETAILS_KEY])
            typed = status.details[0].Unpack(common_pb.Problem())
        return Answer(error.code(), error.details() or "", typed)
    made.cancel()
    return Answer(grpc.StatusCode.OK, "", typed=True)


def test_every_call_is_answered_with_a_typed_status(target: Target) -> None:
    pids, memory = target.pids(), target.memory()
    wrong = asyncio.run(attack(target))
    assert not wrong, "\n".join(sorted(wrong))
    assert target.pids() == pids, "a service died"
    grown = {name: size - memory[name] for name, size in target.memory().items()}
    assert all(size < GROWTH_MIB for size in grown.values()), grown
    asyncio.run(all_are_healthy(target))
    # The workers that the fuzz told the orchestrator of are not there, and are given up.
    after = target.train("after-the-fuzz")
    assert after.job.state == "succeeded", after


async def attack(target: Target) -> set[str]:
    """Call every method repeatedly; return the wrong answers."""
    words, authorization = words_of(target), target.authorization
    methods = methods_of(target)
    assert len(methods) > 80
    wrong: set[str] = set()
    counts: Counter[Method] = Counter()
    codes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    channels = {
        address: grpc.aio.insecure_channel(address, options=channel_options(64))
        for address in {one.address for one in methods}
    }
    end = time.monotonic() + SECONDS
    number = 0

    async def work(lane: int) -> None:
        nonlocal number
        while time.monotonic() < end:
            number += 1
            method = methods[number % len(methods)]
            rng = random.Random(f"{SEED}/{method.process}{method.path}/{counts[method]}")
            counts[method] += 1
            # The method that deletes jobs does not know the job that all others use.
            known = words[1:] if method.descriptor.name in DELETING else words
            body = request_of(method, rng, MessageMaker(rng, known))
            answer = await call(channels[method.address], method, body, rng, authorization)
            codes[method.path][answer.code.name] += 1
            if answer.code in FORBIDDEN or not (answer.typed or answer.code in MADE_BY_GRPC):
                wrong.add(
                    f"{method.process}{method.path} #{counts[method] - 1}: {answer.code.name} "
                    f"{answer.details[:300]}"
                )

    await asyncio.gather(*map(work, range(AT_ONCE)))
    for channel in channels.values():
        await channel.close()
    print(f"{number} calls")
    for path, seen in sorted(codes.items()):
        print(path, dict(seen))
    assert min(counts[method] for method in methods) >= 10, "each method has had its share"
    return wrong


def words_of(target: Target) -> list[str]:
    """Ids that mean something on this cluster, and plain ones."""
    return [
        target.job_id,
        "solver",
        "checker",
        f"{target.job_id}/solver/weights@2",
        f"{target.job_id}:score",
        "score",
        "train",
        "user",
        "float32",
        "int32",
        "0-q1",
        "q0",
        "one",
        "two",
    ]


async def all_are_healthy(target: Target) -> None:
    """Every service of the cluster says that it serves."""
    for one in target.services:
        if one.probe == "grpc":
            async with grpc.aio.insecure_channel(one.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING, one.name


async def test_a_method_that_there_is_not_and_a_body_over_the_limit_are_refused(
    target: Target,
) -> None:
    for one in target.services:
        if one.probe != "grpc":
            continue
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(one.address, options=options) as channel:
            for path, body, expected in (
                ("/troupe.v1.Nothing/Do", b"", grpc.StatusCode.UNIMPLEMENTED),
                (HEALTH, bytes(65 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _unary(channel, path, body)
                assert caught.value.code() is expected


async def _unary(channel: grpc.aio.Channel, path: str, body: bytes) -> Any:
    return await channel.unary_unary(path)(body, timeout=PATIENCE)

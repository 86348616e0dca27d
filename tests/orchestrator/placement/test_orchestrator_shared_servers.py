"""The keepers of attached servers, and the information that other workers get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.placement.shared_servers import SharedServers
from troupe.job import JobSpec
from troupe.rpc import Unavailable
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb

MODEL = {"config": {"model_type": "qwen3"}, "tokenizer": "nowhere"}
CHECKSUM = "c" * 8


@dataclass(eq=False)
class Worker:
    """A rollout worker that records its calls."""

    worker_id: str
    alive: bool = True
    told: list[rollout_pb.ShareServersRequest] = field(default_factory=list)
    deaf: bool = False

    @property
    def rollout(self) -> Worker:
        return self

    def while_alive(self) -> Worker:
        return self

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def ShareServers(self, request: rollout_pb.ShareServersRequest, timeout: float) -> Any:
        if self.deaf:
            raise Unavailable("away")
        self.told.append(request)
        return rollout_pb.ShareServersResponse()

    def status(self, number: int, version: int, policy: str = "big", **other: Any) -> Any:
        """Return an engine's entry in its heartbeat."""
        return rollout_pb.EngineStatus(
            engine_id=f"job.{policy}.{number}@{self.worker_id}",
            job_id="job",
            policy=policy,
            **{"state": common_pb.ENGINE_STATE_HEALTHY, "version": version, "checksum": CHECKSUM}
            | other,
        )


@dataclass
class Job:
    """The parts of a job's context that `SharedServers` uses."""

    spec: JobSpec
    job_id: str = "job"


def shared(workers: list[Worker], urls: int = 3, lora: bool = False) -> Any:
    """Servers of a job with one policy, and workers that have joined."""
    policy: dict[str, Any] = {
        "model": MODEL,
        "engine": {
            "kind": "sglang",
            "urls": [f"http://server-{number}:30000" for number in range(urls)],
        },
    }
    if lora:
        policy["lora"] = {"rank": 4}
    spec = JobSpec.model_validate(
        {
            "name": "shared",
            "workflow": "nowhere:play",
            "tasks": {"source": "nowhere:Tasks"},
            "agents": {"player": {"policy": "big"}},
            "policies": {"big": policy},
            "pipeline": {"steps": 1, "queries_per_step": 2},
        }
    )
    made = SharedServers(Job(spec), lambda: workers)  # type: ignore[arg-type, return-value]
    made.join(workers)  # type: ignore[arg-type]
    return made


def kept(plan: list[rollout_pb.SharedServer]) -> set[int]:
    """The numbers of the servers that a worker keeps."""
    return {server.replica for server in plan if server.kept}


def test_every_server_has_one_keeper_and_every_worker_a_part() -> None:
    workers = [Worker("a"), Worker("b")]
    servers = shared(workers)
    plans = [servers.plan(worker) for worker in workers]
    assert [len(plan) for plan in plans] == [3, 3]
    assert kept(plans[0]) | kept(plans[1]) == {0, 1, 2}
    assert not kept(plans[0]) & kept(plans[1])
    assert {(s.workers, s.place) for s in plans[0]} == {(2, 0)}
    assert {(s.workers, s.place) for s in plans[1]} == {(2, 1)}
    assert not any(server.HasField("version") for plan in plans for server in plan)


async def test_followers_learn_of_the_keeper_s_verified_version_once() -> None:
    keeper, follower = workers = [Worker("a"), Worker("b")]
    servers = shared(workers, urls=1)
    await servers.tell()
    assert [len(worker.told) for worker in workers] == [1, 1]
    # Only the keeper's word counts.
    servers.note(follower, [follower.status(0, 9)])
    await servers.tell()
    assert [len(worker.told) for worker in workers] == [1, 1]
    servers.note(keeper, [keeper.status(0, 4)])
    await servers.tell()
    await servers.tell()
    assert [len(worker.told) for worker in workers] == [1, 2]
    (server,) = follower.told[-1].servers
    assert (server.kept, server.version, server.checksum) == (False, 4, CHECKSUM)
    # An updating server keeps its policy; a dead one does not.
    servers.note(keeper, [keeper.status(0, 4, state=common_pb.ENGINE_STATE_UPDATING)])
    assert servers.plan(follower)[0].version == 4
    servers.note(keeper, [keeper.status(0, 0, state=common_pb.ENGINE_STATE_DEAD)])
    assert not servers.plan(follower)[0].HasField("version")


async def test_a_worker_that_did_not_answer_is_told_again() -> None:
    workers = [Worker("a"), Worker("b", deaf=True)]
    servers = shared(workers)
    await servers.tell()
    workers[1].deaf = False
    await servers.tell()
    assert [len(worker.told) for worker in workers] == [1, 1]


async def test_a_lost_keepers_servers_go_to_the_others_and_are_not_vouched_for() -> None:
    workers = [Worker("a"), Worker("b"), Worker("c")]
    servers = shared(workers, urls=6)
    before = {worker.worker_id: kept(servers.plan(worker)) for worker in workers}
    for worker in workers:
        servers.note(worker, [worker.status(n, 1) for n in before[worker.worker_id]])
    lost = workers.pop(0)
    assert servers.leave(lost)
    assert not servers.leave(lost)
    after = {worker.worker_id: kept(servers.plan(worker)) for worker in workers}
    assert after["b"] > before["b"]
    assert after["c"] > before["c"]
    assert after["b"] | after["c"] == set(range(6))
    for server in servers.plan(workers[0]):
        if not server.kept:
            assert server.HasField("version") is (server.replica in before["c"])
    # A worker that comes later keeps nothing, and follows all.
    late = Worker("d")
    servers.join([*workers, late])
    assert not kept(servers.plan(late))
    assert len(servers.plan(late)) == 6


def test_adapters_are_used_by_their_keepers_only() -> None:
    workers = [Worker("a"), Worker("b")]
    servers = shared(workers, urls=1, lora=True)
    assert [servers.serves(worker) for worker in workers] == [True, False]
    servers.note(workers[0], [workers[0].status(0, 3)])
    (server,) = servers.plan(workers[1])
    assert not server.kept
    assert not server.HasField("version")
    (own,) = servers.plan(workers[0])
    assert (own.workers, own.place) == (1, 0)


def test_policies_that_share_servers_have_one_keeper_of_each() -> None:
    attached = {"kind": "sglang", "urls": [f"http://server-{number}:30000" for number in range(3)]}
    own = {"model": {"path": "/models/qwen"}, "engine": attached}
    policies = {
        "solver": {**own, "lora": {"rank": 4}},
        "critic": {**own, "lora": {"rank": 8}},
        "judge": {**own, "trainable": False},
    }
    spec = JobSpec.model_validate(
        {
            "name": "shared",
            "workflow": "nowhere:play",
            "tasks": {"source": "nowhere:Tasks"},
            "agents": {name: {"policy": name} for name in policies},
            "policies": policies,
            "pipeline": {"steps": 1, "queries_per_step": 2},
        }
    )
    workers = [Worker("a"), Worker("b")]
    made: Any = SharedServers(Job(spec), lambda: workers)  # type: ignore[arg-type, return-value]
    made.join(workers)

    def kept_by() -> list[dict[tuple[str, int], bool]]:
        return [
            {(one.policy, one.replica): one.kept for one in made.plan(worker)}
            for worker in workers
            if worker.alive
        ]

    first, second = kept_by()
    for number in range(3):
        assert len({first[name, number] for name in policies}) == 1
        assert first["solver", number] != second["solver", number]
    # The bare base is not followed either: the server's turns are its keeper's.
    assert {(one.workers, one.place) for one in made.plan(workers[0])} == {(1, 0)}
    workers[1].alive = False
    assert made.leave(workers[1])
    (first,) = kept_by()
    assert all(first.values())

"""The log and its audit: a whole job adds up, and every manual change is noticed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.experience_store.database import Database
from services.experience_store.log import check_versions, pack, unpack
from services.experience_store.records import JobTableKeys, PolicyKeys, SampleRecord
from services.experience_store.store import Store
from tests.support.experience import Stage, ids_of, make_sample, make_stage
from tests.support.experience_client import Client
from troupe.experience import samples_digest
from troupe.rpc import InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

POLICIES = ("checker", "solver")


async def train(stage: Stage, *policies: str) -> None:
    """Claim everything of the open step, commit it with the digest that a trainer sends."""
    for policy in policies or stage.policies:
        response = await stage.claim(claim=f"c{stage.step}-{policy}", policy=policy, samples=4096)
        commit = store_pb.StepCommit(
            policy=policy,
            step=stage.step,
            outcome=store_pb.STEP_OUTCOME_APPLIED,
            weights=common_pb.WeightsRef(job_id=stage.job, policy=policy, version=stage.step + 1),
            samples_digest=samples_digest(ids_of(response)),
        )
        await stage.store.claims.commit(stage.job, "trainer", [response.claim_id], commit)


async def play(stage: Stage, steps: int) -> None:
    """Train `steps` steps, then open one more and end half of it."""
    for step in range(steps):
        if step:
            await stage.open(step)
        await stage.append_all()
        await train(stage)
    await stage.open(steps)
    for place in stage.trajectories[:2]:
        await stage.append(*place)


@pytest.fixture
async def played(stage: Stage) -> Stage:
    """Steps 0 to 3 are trained (0 and 1 forgotten: keep_steps is 2), step 4 is half rolled out."""
    await play(stage, 4)
    assert await stage.store.steps.all(stage.job) == [3, 4]
    return stage


async def audit(stage: Stage) -> store_pb.AuditTablesResponse:
    return await stage.store.audit.check(stage.job)


async def test_a_whole_job_adds_up_over_forgotten_and_live_steps(played: Stage) -> None:
    report = await audit(played)
    assert list(report.violations) == []
    assert (report.steps, report.trajectories_admitted, report.trajectories_ended) == (5, 20, 18)
    assert report.trajectories_by_state == {"COMPLETED": 18}
    assert [policy.policy for policy in report.policies] == list(POLICIES)
    for policy in report.policies:
        assert (policy.appended, policy.trained, policy.live, policy.lost) == (18, 16, 2, 0)
        assert (policy.steps_applied, policy.version, policy.duplicated) == (4, 4, 0)


async def test_drops_failures_and_skipped_steps_are_accounted_for(stage: Stage) -> None:
    rows = [make_sample("q0", n, "q0-s0-t0", reward=None) for n in range(2)]
    await stage.append("q0", "q0-s0-t0", rows)
    await stage.fail("q0", "q0-s0-t1")
    await stage.append("q1", "q1-s0-t0")
    await stage.fail("q1", "q1-s0-t1", "workflow_raised: KeyError")
    await stage.fill("q0_0_q0-s0-t0", drop_reason="reward_failed: 503")
    await stage.fill("q0_1_q0-s0-t0", reward=1.0)
    await stage.claim(claim="c1")
    skipped = store_pb.STEP_OUTCOME_SKIPPED
    await stage.commit(["c1"], outcome=skipped, version=0, reason="loss is NaN")
    report = await audit(stage)
    assert list(report.violations) == []
    assert report.trajectories_by_state == {"COMPLETED": 2, "FAILED": 2}
    checker, solver = report.policies
    assert (solver.appended, solver.dropped, solver.trained, solver.lost) == (3, 3, 0, 0)
    assert solver.drop_reasons == {"reward_failed": 1, "loss is NaN": 2}
    assert (solver.steps_skipped, solver.version) == (1, 0)
    assert (checker.appended, checker.live) == (1, 1)


async def test_a_row_refused_for_a_duplicate_id_is_not_counted_as_lost(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), queries=("q0", "q0_0"))
    first, second = make_sample("q0", 0, "0_t"), make_sample("q0_0", 0, "t")
    assert first.sample_id == second.sample_id
    await stage.append("q0", "0_t", [first])
    await stage.append("q0_0", "t", [second])
    report = await audit(stage)
    assert list(report.violations) == []
    assert report.policies[1].appended == 1


# -- spoiled by hand: `Spoil` changes what Redis holds


class Spoil:
    """Changes in Redis behind the store's back; step 3 is committed, step 4 is live."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.job = JobTableKeys(stage.job)
        self.solver = PolicyKeys(stage.job, "solver")

    async def do(self, *command: Any) -> Any:
        return await self.stage.store.database.call(*command)

    async def record(self, step: int, index: int = 0) -> tuple[str, SampleRecord]:
        book = await self.do("HGETALL", self.solver.step(step, "book"))
        name = sorted(book)[index]
        return name.decode(), SampleRecord.parse(book[name].decode())

    async def write(self, step: int, name: str, record: SampleRecord) -> None:
        await self.do("HSET", self.solver.step(step, "book"), name, record.format())

    async def commit(self, **fields: Any) -> None:
        stored = await self.do("HGET", self.solver.commits, 3)
        number, _, body = stored.partition(b"\n")
        commit = store_pb.StepCommit.FromString(body)
        if "version" in fields:
            commit.weights.version = fields["version"]
        if "digest" in fields:
            commit.samples_digest = fields["digest"]
        number = fields.get("number", number)
        await self.do("HSET", self.solver.commits, 3, number + b"\n" + commit.SerializeToString())

    async def lost_live_row(self) -> None:
        await self.do("HDEL", self.solver.step(4, "book"), (await self.record(4))[0])

    async def lost_trained_row(self) -> None:
        await self.do("HDEL", self.solver.step(3, "book"), (await self.record(3))[0])

    async def lost_logged_row(self) -> None:
        logged = unpack(await self.do("HGET", self.solver.log, 1))
        del logged.samples[0]
        await self.do("HSET", self.solver.log, 1, pack(logged))

    async def trained_in_two_steps(self) -> None:
        name, record = await self.record(3)
        await self.write(4, name, record._replace(origin="3"))
        stored = await self.do("HGET", self.solver.commits, 3)
        await self.do("HSET", self.solver.commits, 4, stored)

    async def other_number(self) -> None:
        await self.commit(number=b"5")

    async def other_digest(self) -> None:
        await self.commit(digest=1)

    async def other_version(self) -> None:
        await self.commit(version=9)

    async def versions(self, change: Callable[[store_pb.PolicyVersion], None]) -> None:
        """Change the newest entry of the list of versions."""
        stored = await self.do("LINDEX", self.solver.versions, -1)
        head, _, body = stored.partition(b"\n")
        version = store_pb.PolicyVersion.FromString(body)
        change(version)
        await self.do("LSET", self.solver.versions, -1, head + b"\n" + version.SerializeToString())

    async def lost_version(self) -> None:
        await self.do("RPOP", self.solver.versions)

    async def other_newest_version(self) -> None:
        await self.versions(lambda one: setattr(one.weights, "version", 9))

    async def other_steps_done(self) -> None:
        await self.versions(lambda one: setattr(one, "step", 7))

    async def other_content(self) -> None:
        def skipped(one: store_pb.PolicyVersion) -> None:
            one.outcome = store_pb.STEP_OUTCOME_SKIPPED
            one.weights.version, one.weights.checksum = 3, "another"

        await self.versions(skipped)

    async def other_restart(self) -> None:
        def restarted(one: store_pb.PolicyVersion) -> None:
            one.restarted, one.outcome, one.step = True, store_pb.STEP_OUTCOME_UNSPECIFIED, 3
            one.weights.checksum = "another"

        await self.versions(restarted)

    async def lost_commit(self) -> None:
        logged = unpack(await self.do("HGET", self.solver.log, 2))
        logged.ClearField("commit")
        await self.do("HSET", self.solver.log, 2, pack(logged))

    async def lost_ending(self) -> None:
        await self.do("HDEL", self.job.ended(3), "q0-s3-t0")

    async def ended_twice(self) -> None:
        ending = await self.do("HGET", self.job.ended(4), "q0-s4-t0")
        await self.do("HSET", self.job.ended(3), "q0-s4-t0", ending)

    async def no_reason(self) -> None:
        name, record = await self.record(4)
        await self.write(4, name, record._replace(state="D"))

    async def unfinished(self) -> None:
        name, record = await self.record(3)
        await self.write(3, name, record._replace(state="R"))

    async def trained_without_commit(self) -> None:
        name, record = await self.record(4)
        await self.write(4, name, record._replace(state="T", uses="1"))

    async def other_row(self) -> None:
        _, record = await self.record(4)
        await self.write(4, "forged", record._replace(trajectory="nobody"))

    async def lost_log(self) -> None:
        await self.do("HDEL", self.job.log, 1)
        await self.do("HDEL", self.solver.log, 1)


SPOILT: dict[str, Sequence[str]] = {
    "lost_live_row": ["step 4, solver: trajectory q0-s4-t0 wrote 1 rows, the table has 0"],
    "lost_trained_row": [
        "trajectory q0-s3-t0 wrote 1 rows, the table has 0",
        "accumulated other samples",
        "the commit counts 4 samples, not 3",
    ],
    "lost_logged_row": [
        "step 1, solver: trajectory q0-s1-t0 wrote 1 rows, the table has 0",
        "step 1, solver: the commit counts 4 samples, not 3",
    ],
    "trained_in_two_steps": ["is trained 2 times, 1 allowed"],
    "other_number": ["step 3, solver: the commit counts 5 samples, not 4"],
    "other_digest": ["step 3, solver: the trainer accumulated other samples than the trained ones"],
    "other_version": ["solver: step 3 is committed as version 9, recorded as 4"],
    "lost_version": ["solver: step 3 is committed, but has no version"],
    "other_newest_version": [
        "solver: step 3 moved version 3 to 9",
        "solver: step 3 is committed as version 4, recorded as 9",
    ],
    "other_steps_done": [
        "solver: step 6 moved 3 steps done to 7",
        "solver: step 3 is committed, but has no version",
    ],
    "lost_commit": ["solver: step 2 has a version, but is not committed"],
    "other_content": ["solver: version 3 has two checksums"],
    "other_restart": ["solver: version 4 is a restart without the first weights"],
    "lost_ending": [
        "step 3: 1 of 2 trajectories of query q0 ended",
        "step 3, solver: rows of q0-s3-t0, which has not ended there",
    ],
    "ended_twice": ["trajectory q0-s4-t0 ended in step 3 and in step 4"],
    "no_reason": ["is dropped without a reason"],
    "unfinished": ["is READY, but the step is over", "counts 4 samples, not 3"],
    "trained_without_commit": ["is trained, but the step is not committed"],
    "other_row": ["rows of nobody, which has not ended there"],
    "lost_log": ["the log lacks steps 1 to 1"],
}


@pytest.mark.parametrize("how", SPOILT)
async def test_the_audit_finds_rows_that_were_changed_by_hand(
    played: Stage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.experience_store.store._PAUSE_SECONDS", 0.01)
    spoil: Callable[[], Awaitable[None]] = getattr(Spoil(played), how)
    await spoil()
    report = await audit(played)
    for words in SPOILT[how]:
        assert any(words in violation for violation in report.violations), report.violations
    solver = report.policies[1]
    if "lost" in how and "row" in how:
        assert solver.lost == 1
    assert solver.duplicated == int(how == "trained_in_two_steps")


# -- the log


async def test_the_log_tells_forgotten_and_live_steps_alike(played: Stage) -> None:
    steps = [step async for step in played.store.audit.read(played.job, "solver", 1)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps[:3]:
        assert step.commit.num_samples == len(step.samples) == 4
        assert {sample.state for sample in step.samples} == {common_pb.SAMPLE_STATE_TRAINED}
        assert {sample.trajectory_id for sample in step.samples} == {
            f"{query}-s{step.step}-t{number}" for query in ("q0", "q1") for number in range(2)
        }
    assert not steps[3].HasField("commit")
    assert len(steps[3].samples) == 2


async def test_long_steps_are_read_in_parts(played: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.experience_store.store.PART", 3)
    monkeypatch.setattr("services.experience_store.log._LONG", 1)
    found = [part async for part in played.store.audit.read(played.job, "solver", 2)]
    assert [(part.step, len(part.samples)) for part in found] == [
        (2, 3),
        (2, 1),
        (3, 3),
        (3, 1),
        (4, 2),
    ]
    assert [part.commit.num_samples for part in found] == [4, 4, 4, 4, 0]
    ids = [sample.sample_id for part in found for sample in part.samples]
    assert len(set(ids)) == 10
    assert list((await audit(played)).violations) == []


async def test_the_log_is_small(store: Store) -> None:
    stage = await make_stage(
        store, new_id("job"), policies=("solver",), queries=tuple(map(str, range(64))), group_size=8
    )
    await stage.append_all()
    await train(stage)
    for step in range(1, 4):
        await stage.open(step)
    size = await store.database.call("HSTRLEN", PolicyKeys(stage.job, "solver").log, 0)
    assert 0 < size < 512 * 12, "about ten bytes a sample"


async def test_the_audit_works_when_the_tables_are_gone(played: Stage) -> None:
    before = await audit(played)
    await played.store.tables.drop(played.job)
    report = await audit(played)
    assert list(report.violations) == []
    assert report.trajectories_ended == before.trajectories_ended
    for policy in report.policies:
        assert (policy.appended, policy.trained, policy.live, policy.lost) == (18, 16, 0, 0)
        assert policy.drop_reasons == {"job_over": 2}
    steps = [step async for step in played.store.audit.read(played.job, "solver", 0)]
    assert [step.job_over for step in steps] == [False] * 4 + [True]
    await played.store.tables.drop(played.job, purge_log=True)
    with pytest.raises(NotFound):
        await audit(played)


class CrashError(Exception):
    """The process is gone."""


class CrashingDatabase(Database):
    """Dies before its `fatal`-th round trip after it is armed."""

    left = -1

    async def call_each(
        self, commands: Sequence[Sequence[Any]], *, keep_mistyped: bool = False
    ) -> list[Any]:
        self.left -= 1
        if self.left == 0:
            raise CrashError
        return await super().call_each(commands, keep_mistyped=keep_mistyped)


@pytest.mark.parametrize("deed", ["trim", "drop"])
async def test_a_crash_between_log_and_forget_loses_and_doubles_nothing(
    redis_url: str, deed: str
) -> None:
    database = CrashingDatabase(redis_url)
    store = Store(database, keep_steps=2)
    fatal, crashed = 0, True
    while crashed:
        fatal += 1
        stage = await make_stage(store, new_id("job"), group_size=1)
        await stage.append_all()
        await train(stage)
        await stage.open(1)
        await stage.append("q0", "q0-s1-t0")

        async def act(stage: Stage = stage) -> None:
            if deed == "drop":
                await store.tables.drop(stage.job)
            else:
                await stage.open(2)

        database.left, crashed = fatal, False
        try:
            await act()
        except CrashError:
            crashed = True
        database.left = -1
        report = await audit(stage)
        assert list(report.violations) == [], fatal
        await act()
        if deed == "trim":
            # The next call that opens a step completes the work of the crashed one.
            await stage.open(3)
        report = await audit(stage)
        assert list(report.violations) == []
        for policy in report.policies:
            assert (policy.appended, policy.trained) == (3, 2)
            assert policy.live + policy.dropped == 1
        totals = await database.call("HGET", PolicyKeys(stage.job, "solver").totals, "T")
        assert int(totals) == 2, "added to the totals once"
    assert fatal > 8
    await database.close()


async def test_audit_and_log_over_the_wire(client: Client) -> None:
    await client.create()
    await client.stub.OpenStep(client.open_request())
    await client.stub.AppendTrajectory(client.append_request("q0", "q0-t0"))
    report = await client.stub.AuditTables(store_pb.AuditTablesRequest(job_id=client.job))
    assert (report.policies[0].live, list(report.violations)) == (1, [])
    request = store_pb.ReadLogRequest(job_id=client.job, policy="solver")
    steps = [step async for step in client.stub.ReadLog(request)]
    assert [len(step.samples) for step in steps] == [1]
    with pytest.raises(NotFound):
        await client.stub.AuditTables(store_pb.AuditTablesRequest(job_id="nobody"))
    request.from_step = -1
    with pytest.raises(InvalidArgument, match="from_step"):
        _ = [step async for step in client.stub.ReadLog(request)]
    request.from_step = 0
    request.policy = "nobody"
    with pytest.raises(NotFound):
        _ = [step async for step in client.stub.ReadLog(request)]


@pytest.mark.parametrize(("begun", "said"), [(1, []), (2, ["step 1 has a version, but is not"])])
def test_a_step_that_is_committed_while_the_log_is_read_is_no_fault(
    begun: int, said: list[str]
) -> None:
    """The list of versions is read after the log: only versions that were there before it must
    have their commits in it."""

    def version(number: int) -> store_pb.PolicyVersion:
        return store_pb.PolicyVersion(
            weights=common_pb.WeightsRef(policy="p", version=number, checksum=str(number)),
            step=number,
            outcome=store_pb.STEP_OUTCOME_APPLIED,
        )

    found = check_versions("p", {0: 1}, [version(n) for n in range(3)], begun)
    assert len(found) == len(said)
    assert all(part in one for part, one in zip(said, found, strict=True))

"""Weight versions: each follows the previous one, after any repetition and any death."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.experience_store.store import Store
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Stage, make_stage
from tests.support.experience_client import Client
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
APPLIED = store_pb.STEP_OUTCOME_APPLIED
SKIPPED = store_pb.STEP_OUTCOME_SKIPPED
EMPTY = store_pb.STEP_OUTCOME_EMPTY
NONE = store_pb.STEP_OUTCOME_UNSPECIFIED


class Version(NamedTuple):
    """The model's record of one entry."""

    step: int
    version: int
    checksum: str
    outcome: store_pb.StepOutcome.ValueType = NONE
    restarted: bool = False

    @staticmethod
    def of(found: store_pb.PolicyVersion) -> Version:
        weights = found.weights
        return Version(
            found.step, weights.version, weights.checksum, found.outcome, found.restarted
        )


class VersionsOfAPolicy(RuleBasedStateMachine):
    """One policy whose versions move by commits and restarts; the store may die at any call."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = CrashingDatabase(self.url)
        self.stage = Stage(
            Store(self.database), new_id("job"), ("solver",), ("q0",), 1, first_checksum="first"
        )
        self.model: list[Version] = []
        # Step -> the claims of its commit.
        self.claims: dict[int, list[str]] = {}

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def attempt(self, data: st.DataObject, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the reply of a call that is repeated after the store's death, or once more
        anyway."""
        self.database.die(data.draw(st.integers(1, 4)), data.draw(st.sampled_from(MOMENTS)))
        with contextlib.suppress(CrashError):
            self.do(call())
        self.database.live()
        return self.do(call())

    def refused(self, call: Coroutine[Any, Any, Any]) -> str:
        with pytest.raises(FailedPrecondition) as error:
            self.do(call)
        assert error.value.remedy
        return error.value.kind

    def weights(self, version: int, checksum: str) -> common_pb.WeightsRef:
        return self.stage.weights(version, checksum=checksum)

    @property
    def newest(self) -> Version:
        return self.model[-1]

    @property
    def known(self) -> dict[int, str]:
        return {one.version: one.checksum for one in self.model}

    @initialize(data=st.data(), first=st.integers(0, 3))
    def begin(self, data: st.DataObject, first: int) -> None:
        stage, versions = self.stage, self.stage.store.versions
        self.do(stage.store.tables.create(stage.job, stage.policies, []))
        assert self.refused(versions.restart(stage.job, 0, self.weights(1, "a"))) == "version_gap"
        weights = self.weights(first, "first")
        found = self.attempt(data, lambda: versions.open(stage.job, weights))
        self.model.append(Version(0, first, "first"))
        assert Version.of(found) == self.newest

    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        """Send first weights again: they change nothing, and other content is refused."""
        stage, versions = self.stage, self.stage.store.versions
        version = data.draw(st.integers(0, self.newest.version + 1))
        checksum = self.known.get(version, "new")
        found = self.attempt(
            data, lambda: versions.open(stage.job, self.weights(version, checksum))
        )
        assert Version.of(found) == self.newest
        if version in self.known:
            other = self.weights(version, "other")
            assert self.refused(versions.open(stage.job, other)) == "checksum_conflict"

    @rule(data=st.data(), outcome=st.sampled_from([APPLIED, SKIPPED, EMPTY]))
    def step(self, data: st.DataObject, outcome: store_pb.StepOutcome.ValueType) -> None:
        stage, step = self.stage, self.newest.step
        self.do(stage.open(step, self.newest.version))
        (place,) = stage.trajectories
        claims = [] if outcome == EMPTY else [f"c{step}"]
        if claims:
            self.do(stage.append(*place))
            self.do(stage.claim(claim=claims[0]))
        else:
            self.do(stage.fail(*place))
        rise = int(outcome == APPLIED)
        version = self.newest.version + rise
        checksum = f"step-{step}" if rise else self.newest.checksum

        def commit(version: int, checksum: str) -> Coroutine[Any, Any, Any]:
            how = {"outcome": outcome, "reason": "nan" if outcome == SKIPPED else ""}
            return stage.commit(claims, version=version, checksum=checksum, **how)

        wrong = data.draw(st.integers(0, self.newest.version + 3).filter(lambda v: v != version))
        content = self.known.get(wrong, "new")
        assert self.refused(commit(wrong, content)) == "version_gap"
        if version in self.known:
            assert self.refused(commit(version, "other")) == "checksum_conflict"
        self.attempt(data, lambda: commit(version, checksum))
        self.claims[step] = claims
        self.model.append(Version(step + 1, version, checksum, outcome))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def commit_an_old_step(self, data: st.DataObject) -> None:
        """Repeat a trainer's commit, which returns the valid one."""
        step = data.draw(st.sampled_from(sorted(self.claims)))
        self.stage.step = step
        commit, existed = self.do(self.stage.commit(self.claims[step], version=99, checksum="x"))
        assert existed
        (entry,) = [one for one in self.model if one.step == step + 1 and not one.restarted]
        assert (commit.weights.version, commit.weights.checksum) == (entry.version, entry.checksum)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        stage, versions, newest = self.stage, self.stage.store.versions, self.newest
        first = self.model[0].checksum

        def restart(steps: int, version: int, checksum: str) -> Coroutine[Any, Any, Any]:
            return versions.restart(stage.job, steps, self.weights(version, checksum))

        for steps, version in ((0, 2), (1, 1), (-1, 1)):
            wrong = restart(newest.step + steps, newest.version + version, first)
            assert self.refused(wrong) == "version_gap"
        assert self.refused(restart(newest.step, newest.version, "other")) == "checksum_conflict"
        found = self.attempt(data, lambda: restart(newest.step, newest.version + 1, first))
        self.model.append(Version(newest.step, newest.version + 1, first, restarted=True))
        assert Version.of(found) == self.newest

    @rule(data=st.data())
    def restart_late(self, data: st.DataObject) -> None:
        """Make the late call of an orchestrator that died, which changes nothing."""
        one = data.draw(st.sampled_from(self.model))
        weights = self.weights(one.version, one.checksum)
        found = self.do(self.stage.store.versions.restart(self.stage.job, one.step, weights))
        assert Version.of(found) == self.newest

    @invariant()
    def versions_are_those_of_the_model(self) -> None:
        versions, job = self.stage.store.versions, self.stage.job
        if not self.model:
            return
        found = self.do(versions.all(job, "solver"))
        assert [Version.of(one) for one in found] == self.model
        (newest,) = self.do(versions.newest(job))
        assert newest == found[-1]
        report = self.do(self.stage.store.audit.check(job))
        assert list(report.violations) == []

    def teardown(self) -> None:
        store, job = self.stage.store, self.stage.job
        if self.model:
            self.do(store.tables.drop(job))
            self.versions_are_those_of_the_model()
            with pytest.raises(NotFound):
                self.do(store.versions.open(job, self.weights(0, "first")))
        self.do(store.tables.drop(job, purge_log=True))
        assert not self.do(store.versions.newest(job))
        assert not self.do(self.database.call("KEYS", f"*{job}*"))
        self.do(self.database.close())
        self.runner.close()


@pytest.mark.parametrize("examples", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_versions_move_by_one_step_or_one_restart_whatever_dies(
    redis_url: str, examples: int
) -> None:
    VersionsOfAPolicy.url = redis_url
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        VersionsOfAPolicy,
        settings=settings(max_examples=examples, stateful_step_count=12, deadline=None),
    )


async def test_versions_come_in_pages_oldest_first(store: Store) -> None:
    stage = await make_stage(store, new_id("job"), policies=("solver",))
    for version in range(1, 8):
        await store.versions.restart(stage.job, 0, stage.weights(version))
    found: list[int] = []
    sizes, token, more = [], "", True
    while more:
        page, token = await store.versions.page(stage.job, "solver", 3, token)
        sizes.append(len(page))
        found += [one.weights.version for one in page]
        more = bool(token)
    assert (found, sizes) == ([*range(8)], [3, 3, 2])
    for wrong in ("-1", "x", "1.5", "٣", "9" * 30):
        with pytest.raises(InvalidArgument, match="page"):
            await store.versions.page(stage.job, "solver", 3, wrong)
    assert await store.versions.page(stage.job, "nobody", 3) == ([], "")


async def test_policies_that_are_not_trained_have_versions_too(client: Client) -> None:
    await client.create()
    weights = common_pb.WeightsRef(job_id=client.job, policy="teacher", version=3, checksum="abc")
    request = store_pb.OpenVersionRequest(request_id=new_id(), job_id=client.job, weights=weights)
    for _ in range(2):
        assert (await client.stub.OpenVersion(request)).newest.weights == weights
    newest = store_pb.GetNewestVersionsRequest(job_id=client.job)
    found = (await client.stub.GetNewestVersions(newest)).versions
    assert [one.weights.policy for one in found] == ["solver", "teacher"]
    listing = store_pb.ListPolicyVersionsRequest(job_id=client.job, policy="teacher")
    assert [one.weights for one in (await client.stub.ListPolicyVersions(listing)).versions] == [
        weights
    ]
    restart = store_pb.RestartVersionRequest(
        request_id=new_id(), job_id=client.job, weights=weights, steps_done=0
    )
    restart.weights.version = 4
    assert (await client.stub.RestartVersion(restart)).newest.restarted
    drop = store_pb.DropTablesRequest(request_id=new_id(), job_id=client.job)
    await client.stub.DropTables(drop)
    assert len((await client.stub.GetNewestVersions(newest)).versions) == 2
    with pytest.raises(AlreadyExists):
        await client.create()
    drop.request_id, drop.purge_log = new_id(), True
    await client.stub.DropTables(drop)
    assert not (await client.stub.GetNewestVersions(newest)).versions

"""The gRPC servicer of the experience store, which validates and translates requests for the
store."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from pydantic import Field

from services.chassis.idempotency import compares, repeatable
from services.chassis.redis import RedisWatch
from services.chassis.settings import ServiceSettings
from services.chassis.telemetry import Telemetry
from services.experience_store import requests
from services.experience_store.database import Database
from services.experience_store.metrics import Meters
from services.experience_store.records import Ending, RawRow, StagedRow
from services.experience_store.requests import (
    check_columns,
    check_id,
    check_not_negative,
    check_payloads,
    check_reward,
    check_size,
    check_vector,
    enum_name,
    printable,
)
from services.experience_store.samples import DEFAULT_BYTES, MIB, SampleFills
from services.experience_store.store import Store
from services.experience_store.trajectories import Append
from troupe import tensors
from troupe.rpc import InvalidArgument, ResourceExhausted, TroupeError, protobuf_wire, to_status
from troupe.rpc.ids import check_name
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import experience_store_pb2_grpc as store_grpc


def check_append(
    request: store_pb.AppendTrajectoryRequest, raw_rows: Sequence[RawRow]
) -> list[StagedRow]:
    """Check an ending and its serialized rows (`raw_rows`); return the rows, each read once.

    `query_id` and `trajectory_id` are already checked.
    """
    ends = (
        common_pb.TRAJECTORY_STATE_COMPLETED,
        common_pb.TRAJECTORY_STATE_FAILED,
        common_pb.TRAJECTORY_STATE_ABORTED,
    )
    if request.state not in ends:
        raise InvalidArgument(
            "does not end a trajectory",
            field="state",
            value=enum_name(common_pb.TrajectoryState, request.state),
            remedy="Send COMPLETED, FAILED or ABORTED.",
        )
    if request.state != common_pb.TRAJECTORY_STATE_COMPLETED:
        if raw_rows:
            raise InvalidArgument(
                "a trajectory that did not complete has no samples", field="samples"
            )
        if not request.reason:
            raise InvalidArgument("say why it did not complete", field="reason")
    seen: set[str] = set()
    rows: list[StagedRow] = []
    names = store_pb.Sample(query_id=request.query_id, trajectory_id=request.trajectory_id)
    for index, raw_row in enumerate(raw_rows):
        try:
            row = _read(names, raw_row)
        except InvalidArgument as error:
            # Not passed down, since formatting it would cost as much as the checks of a good row.
            place = f"samples[{index}]"
            error.field = place if error.field is None else f"{place}.{error.field}"
            raise
        if row.sample in seen:
            raise InvalidArgument(
                "occurs twice", field=f"samples[{index}].sample_id", value=row.sample
            )
        seen.add(row.sample)
        if row.parent is not None:
            _check_stem(f"samples[{index}].stem", row, rows)
        rows.append(row)
    return rows


def _check_stem(field: str, row: StagedRow, before: Sequence[StagedRow]) -> None:
    """Check that a row's stem is the beginning of an earlier one."""
    for one in reversed(before):
        if one.turn == row.parent and one.policy == row.policy:
            if 0 < row.shared <= one.tokens:
                return
            raise InvalidArgument(
                f"turn {one.turn} has {one.tokens} tokens",
                kind="stem_unknown",
                field=f"{field}.tokens",
                value=row.shared,
                remedy="Make stems with troupe.prefixes.",
            )
    raise InvalidArgument(
        "must name an earlier sample of the same policy in this call",
        kind="stem_unknown",
        field=f"{field}.turn",
        value=row.parent,
        remedy="Send the samples of a trajectory in the order of their turns.",
    )


def _read(names: store_pb.Sample, raw_row: RawRow) -> StagedRow:
    """Parse and check the row in `raw_row`; `names`: see `StagedRow.of`. Raises `InvalidArgument`;
    its field is within the row."""
    sample = store_pb.Sample()
    try:
        # It takes views, too, though its types do not say so.
        sample.ParseFromString(raw_row)  # type: ignore[arg-type]
    except DecodeError as error:
        raise InvalidArgument(f"is not a Sample: {error}") from error
    _check_ids(names, sample)
    prompt = check_vector("prompt_ids", sample.prompt_ids, *tensors.ID_DTYPES)
    response = check_vector("response_ids", sample.response_ids, *tensors.ID_DTYPES)
    logprobs = check_vector("logprobs", sample.logprobs, common_pb.DTYPE_FLOAT32)
    if logprobs != response:
        raise InvalidArgument(
            f"must have one value per response token ({response})", field="logprobs", value=logprobs
        )
    row = StagedRow.of(sample, raw_row, prompt + response, names)
    if row.version.startswith("-"):
        check_not_negative("versions", int(row.version))
    if row.reward is not None:
        check_reward("reward", row.reward)
    if row.columns:
        check_columns("columns", sample.columns)
    if sample.payloads:
        check_payloads("payloads", sample)
    check_size(None, len(raw_row))
    return row


_IDS: Final = ("query_id", "trajectory_id", "sample_id")


def _check_ids(names: store_pb.Sample, sample: store_pb.Sample) -> None:
    """Check the ids of a row against the query and trajectory in `names`."""
    query, trajectory = names.query_id, names.trajectory_id
    given = sample.query_id, sample.trajectory_id, sample.sample_id
    right = query, trajectory, f"{query}_{sample.turn}_{trajectory}"
    if given != right:
        for field, ours, theirs in zip(_IDS, given, right, strict=True):
            if ours != theirs:
                raise InvalidArgument(f"must be {theirs}", field=field, value=printable(ours))
    check_id("sample_id", sample.sample_id)
    check_id("group_id", sample.group_id)
    check_id("agent", sample.agent)


T = TypeVar("T")


@dataclass(frozen=True)
class WriteBatch:
    """A WriteRequest whose samples stay serialized, as views of the request's bytes.

    Serializing parsed samples again, here and in answers to claims, would cost 18 % of the rows
    per second (docs/benchmarks/experience-store.md).
    """

    request_id: str
    endings: Sequence[store_pb.AppendTrajectoryRequest]
    """The requests without their samples."""
    raw_rows: Sequence[Sequence[RawRow]]
    fills: Sequence[store_pb.FillColumnsRequest]

    @staticmethod
    def parse(data: bytes) -> WriteBatch:
        """Return the batch in `data`. Raises `DecodeError`."""
        rest, spans = protobuf_wire.split(
            data, 0, len(data), store_pb.WriteRequest.ENDINGS_FIELD_NUMBER
        )
        request = store_pb.WriteRequest.FromString(rest)
        field = store_pb.AppendTrajectoryRequest.SAMPLES_FIELD_NUMBER
        view = memoryview(data)
        endings: list[store_pb.AppendTrajectoryRequest] = []
        raw_rows: list[list[RawRow]] = []
        for span in spans:
            ending, samples = protobuf_wire.split(data, *span, field)
            endings.append(store_pb.AppendTrajectoryRequest.FromString(ending))
            raw_rows.append([view[start:end] for start, end in samples])
        return WriteBatch(request.request_id, endings, raw_rows, request.fills)

    def parts(self) -> bytes:
        """Return the ids of its parts, which identify their contents."""
        endings = [part.request_id for part in self.endings]
        return repr((endings, [part.request_id for part in self.fills])).encode()


class Writes:
    """Writes of endings and of late columns, many per call."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._store = store
        self._meters = meters

    async def end_each(
        self,
        sent: Sequence[store_pb.AppendTrajectoryRequest],
        raw_rows: Sequence[Sequence[RawRow]] = (),
    ) -> list[store_pb.AppendTrajectoryResponse | TroupeError]:
        """Return the answers to these calls, or their errors. `raw_rows`: the serialized samples of
        each, if the requests lack them.
        """
        known = raw_rows or [
            [sample.SerializeToString() for sample in request.samples] for request in sent
        ]
        appends = []
        for one in zip(sent, known, strict=True):
            appends.append(_of(_append_of, *one))
            # A call brings hundreds of rows, so let other calls be answered in between.
            await asyncio.sleep(0)
        for number, append in enumerate(appends):
            if isinstance(append, Append):
                try:
                    size = sum(len(row.raw_row) for row in append.rows)
                    await self._store.high_water.admit(append.job, append.step, size)
                except TroupeError as error:
                    if isinstance(error, ResourceExhausted):
                        self._meters.pushed_back.inc()
                    appends[number] = error
        taken = [append for append in appends if isinstance(append, Append)]
        ended = iter(await self._store.trajectories.append_each(taken))
        answers: list[store_pb.AppendTrajectoryResponse | TroupeError] = []
        for append in appends:
            if isinstance(append, TroupeError):
                answers.append(append)
                continue
            result = next(ended)
            if isinstance(result, TroupeError):
                answers.append(result)
                continue
            self._meters.appended(append, result.accepted)
            answers.append(
                store_pb.AppendTrajectoryResponse(
                    accepted=result.accepted,
                    step=result.step,
                    drop_reason=result.drop_reason,
                    group_complete=result.group_complete,
                )
            )
        return answers

    async def fill_each(
        self, sent: Sequence[store_pb.FillColumnsRequest]
    ) -> list[store_pb.FillColumnsResponse | TroupeError]:
        """Return the answers to these calls, or their errors."""
        fills = [_of(_fills_of, request) for request in sent]
        taken = [one for one in fills if isinstance(one, SampleFills)]
        filled = iter(await self._store.samples.fill_each(taken))
        answers: list[store_pb.FillColumnsResponse | TroupeError] = []
        for one in fills:
            result = next(filled) if isinstance(one, SampleFills) else one
            if isinstance(result, TroupeError):
                answers.append(result)
                continue
            answers.append(_filled(tuple(result)))
        return answers


def _of(read: Callable[..., T], *request: Any) -> T | TroupeError:
    try:
        return read(*request)
    except TroupeError as error:
        return error


@functools.lru_cache(maxsize=1024)
def _filled(
    results: Sequence[tuple[common_pb.SampleState.ValueType, bool]],
) -> store_pb.FillColumnsResponse:
    """Return the answer to a fill. Cached, since most are alike, so it must not be changed."""
    (state, accepted), *more = results
    return store_pb.FillColumnsResponse(
        state=state,
        accepted=accepted,
        more=[store_pb.SampleFilled(state=s, accepted=a) for s, a in more],
    )


def _append_of(request: store_pb.AppendTrajectoryRequest, raw_rows: Sequence[RawRow]) -> Append:
    requests.check_common(request)
    requests.check_step(request.step)
    requests.check_id("query_id", request.query_id)
    requests.check_id("trajectory_id", request.trajectory_id)
    rows = check_append(request, raw_rows)
    state = common_pb.TrajectoryState.Name(request.state).removeprefix("TRAJECTORY_STATE_")
    reason = requests.clean_reason(request.reason)
    solved = "1" if request.solved else ""
    ending = Ending(state, request.request_id, request.query_id, reason, solved=solved)
    return Append(request.job_id, request.step, request.trajectory_id, ending, rows)


def _fills_of(request: store_pb.FillColumnsRequest) -> SampleFills:
    requests.check_step_call(request)
    fills = [requests.check_fill("", request)]
    for index, item in enumerate(request.more):
        fills.append(requests.check_fill(f"more[{index}].", item))
    return SampleFills(request.job_id, request.policy, request.step, fills)


class StoreSettings(ServiceSettings):
    """`ServiceSettings`, the Redis for samples, and bounds on rows' bytes."""

    store_redis_url: str | None = None
    """Redis that holds samples, if not `redis_url`. `redis-cluster://HOST:PORT` names one node of a
    Redis Cluster."""
    store_high_water_mib: int = Field(default=0, ge=0)
    """Bytes of rows above which the store refuses rows, except rows of a job's oldest uncommitted
    step; 0: no bound. Half of Redis' `maxmemory` leaves room for other data."""

    store_recent_mib: int = Field(default=DEFAULT_BYTES // MIB, ge=0)
    """Bytes of rows kept in the store's own memory from append to claim, so that it need not read
    them back from Redis; 0: none. Affects only speed."""

    @property
    def samples_url(self) -> str:
        """URL of the Redis that holds samples."""
        return self.store_redis_url or self.redis_url


# Seconds of a call's deadline reserved for reading raw rows and answering.
_DEADLINE_MARGIN: Final = 0.5


def _ending_of(request: store_pb.AppendTrajectoryRequest) -> bytes:
    """Return the request with the ids of its rows instead of the rows, to compare repeated
    requests."""
    ending = (request.job_id, request.step, request.query_id, request.trajectory_id)
    samples = [sample.sample_id for sample in request.samples]
    return repr((*ending, request.state, request.reason, samples)).encode()


class ExperienceStoreService(store_grpc.ExperienceStoreServicer):
    """The gRPC service of a `Store`, which the chassis starts and stops."""

    name = "troupe.v1.ExperienceStore"

    def __init__(self, store: Store, meters: Meters, redis_watch: RedisWatch) -> None:
        self.store = store
        self._meters = meters
        self._redis_watch = redis_watch
        self._writes = Writes(store, meters)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with the chassis' server."""
        store_grpc.add_ExperienceStoreServicer_to_server(self, server)
        # gRPC does not parse its request. The handler registered last for a method is used.
        write = grpc.unary_unary_rpc_method_handler(
            self.Write, WriteBatch.parse, store_pb.WriteResponse.SerializeToString
        )
        server.add_registered_method_handlers(self.name, {"Write": write})  # type: ignore[attr-defined]

    @property
    def problem(self) -> str | None:
        """Why Redis cannot be reached yet, or what is wrong with it now."""
        trouble = self._redis_watch.trouble
        return self.store.database.problem or (None if trouble is None else str(trouble))

    async def start(self) -> None:
        """Start the store; return once Redis answers."""
        await self.store.start()
        self._meters.start()
        self._redis_watch.start()

    async def stop(self, grace: float) -> None:
        """Stop the store."""
        await self._redis_watch.stop()
        await self._meters.stop()
        await self.store.stop()

    async def CreateTables(
        self, request: store_pb.CreateTablesRequest, context: Any
    ) -> store_pb.CreateTablesResponse:
        requests.check_common(request)
        requests.check_create(request)
        await self.store.database.risks()
        await self.store.tables.create(
            request.job_id,
            request.policies,
            request.required_columns,
            max_uses=request.max_uses or 1,
            drop_without_signal=request.drop_without_signal,
        )
        return store_pb.CreateTablesResponse()

    async def OpenStep(
        self, request: store_pb.OpenStepRequest, context: Any
    ) -> store_pb.OpenStepResponse:
        requests.check_common(request)
        requests.check_step(request.step)
        table = await self.store.tables.get(request.job_id)
        requests.check_open(request, table.policies)
        existed, ended = await self.store.steps.open(request)
        return store_pb.OpenStepResponse(existed=existed, ended_trajectory_ids=ended)

    # The id names one ending of one trajectory (`Ending.attempt`): a repeated request gets the
    # first answer, and its rows need not be compared for that.
    @compares(_ending_of)
    async def AppendTrajectory(
        self, request: store_pb.AppendTrajectoryRequest, context: Any
    ) -> store_pb.AppendTrajectoryResponse:
        return _given(*await self._writes.end_each([request]))

    async def FillColumns(
        self, request: store_pb.FillColumnsRequest, context: Any
    ) -> store_pb.FillColumnsResponse:
        return _given(*await self._writes.fill_each([request]))

    @compares(WriteBatch.parts)
    async def Write(self, request: WriteBatch, context: Any) -> store_pb.WriteResponse:  # type: ignore[override]
        requests.check_id("request_id", request.request_id)
        # Independent of each other: columns are filled after the answer to their rows' append.
        async with asyncio.TaskGroup() as group:
            # Columns first: they are quick to write, and claims may wait for them.
            filled = group.create_task(self._writes.fill_each(request.fills))
            ended = group.create_task(self._writes.end_each(request.endings, request.raw_rows))
        return store_pb.WriteResponse(
            endings=[store_pb.EndingWritten(**_written(one)) for one in ended.result()],
            fills=[store_pb.FillWritten(**_written(one)) for one in filled.result()],
        )

    # A repeated claim finds its samples in Redis. It may know other claims than the first call did
    # (a resumed step knows none), so it gets its own answer. It is cancelled when its caller
    # leaves, since its lease would not be renewed.
    @repeatable
    async def ClaimMicroBatch(
        self, request: store_pb.ClaimMicroBatchRequest, context: Any
    ) -> Any:  # the bytes of a ClaimMicroBatchResponse
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("max_samples", request.max_samples, requests.LARGEST_CLAIM)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        requests.check_not_negative("max_tokens", request.max_tokens)
        requests.check_not_negative("oldest_version", request.oldest_version)
        requests.check_not_negative("wait_seconds", request.wait_seconds)
        for claim in request.known_claims:
            requests.check_id("known_claims", claim)
        delivery = await self.store.claims.claim(request, _wait_of(request, context))
        self._meters.claimed(request.policy, delivery)
        return delivery.message

    async def RenewClaims(
        self, request: store_pb.RenewClaimsRequest, context: Any
    ) -> store_pb.RenewClaimsResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_positive("lease_seconds", request.lease_seconds, requests.LONGEST_LEASE)
        renewed = await self.store.claims.renew(
            request.job_id, request.policy, request.step, request.claimant, request.lease_seconds
        )
        return store_pb.RenewClaimsResponse(renewed=renewed)

    async def ReleaseClaims(
        self, request: store_pb.ReleaseClaimsRequest, context: Any
    ) -> store_pb.ReleaseClaimsResponse:
        requests.check_step_call(request)
        if request.claimant:
            requests.check_id("claimant", request.claimant)
        released = await self.store.claims.release(
            request.job_id, request.policy, request.step, request.claimant
        )
        return store_pb.ReleaseClaimsResponse(released=released)

    async def DropGone(
        self, request: store_pb.DropGoneRequest, context: Any
    ) -> store_pb.DropGoneResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_id("claim_id", request.claim_id)
        requests.check_drop_gone(request)
        dropped = await self.store.claims.drop_gone(
            request.job_id,
            request.policy,
            request.step,
            request.claimant,
            request.claim_id,
            request.sample_ids,
        )
        return store_pb.DropGoneResponse(dropped=dropped)

    # A repeated call finds the sums of the first one. It is cancelled when its caller leaves.
    @repeatable
    async def ExchangePairSums(
        self, request: store_pb.ExchangePairSumsRequest, context: Any
    ) -> store_pb.ExchangePairSumsResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_pair_sums("sums", request.sums)
        requests.check_not_negative("wait_seconds", request.wait_seconds)
        return await self.store.pairs.exchange(request, _wait_of(request, context))

    async def CommitStep(
        self, request: store_pb.CommitStepRequest, context: Any
    ) -> store_pb.CommitStepResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_commit(request)
        shared = store_pb.StepCommit.DESCRIPTOR.fields_by_name
        fields = {field.name: value for field, value in request.ListFields()}
        commit, existed = await self.store.claims.commit(
            request.job_id,
            request.claimant,
            request.claim_ids,
            store_pb.StepCommit(**{name: fields[name] for name in fields.keys() & shared.keys()}),
            durable=request.durable,
            kept=request.kept_micro_batches if request.HasField("kept_micro_batches") else None,
            sums=request.pair_sums if request.HasField("pair_sums") else None,
        )
        if not existed:
            self._meters.committed(commit)
        return store_pb.CommitStepResponse(
            commit=commit, existed=existed, over_high_water=self.store.high_water.over
        )

    async def OpenVersion(
        self, request: store_pb.OpenVersionRequest, context: Any
    ) -> store_pb.OpenVersionResponse:
        requests.check_common(request)
        requests.check_weights(request)
        newest = await self.store.versions.open(request.job_id, request.weights)
        return store_pb.OpenVersionResponse(newest=newest)

    async def RestartVersion(
        self, request: store_pb.RestartVersionRequest, context: Any
    ) -> store_pb.RestartVersionResponse:
        requests.check_common(request)
        requests.check_weights(request)
        requests.check_not_negative("steps_done", request.steps_done)
        newest = await self.store.versions.restart(
            request.job_id, request.steps_done, request.weights
        )
        return store_pb.RestartVersionResponse(newest=newest)

    async def GetNewestVersions(
        self, request: store_pb.GetNewestVersionsRequest, context: Any
    ) -> store_pb.GetNewestVersionsResponse:
        check_name("job_id", request.job_id)
        found = await self.store.versions.newest(request.job_id)
        return store_pb.GetNewestVersionsResponse(versions=found)

    async def ListPolicyVersions(
        self, request: store_pb.ListPolicyVersionsRequest, context: Any
    ) -> store_pb.ListPolicyVersionsResponse:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        size = requests.page_size(request.page_size)
        versions, token = await self.store.versions.page(
            request.job_id, request.policy, size, request.page_token
        )
        return store_pb.ListPolicyVersionsResponse(versions=versions, next_page_token=token)

    # A repeated call replaces the copy by an equal one; its request is too large to be compared.
    @compares(lambda request: repr((request.policy, request.step, request.index)).encode())
    async def KeepRows(
        self, request: store_pb.KeepRowsRequest, context: Any
    ) -> store_pb.KeepRowsResponse:
        requests.check_step_call(request)
        requests.check_id("claimant", request.claimant)
        requests.check_not_negative("index", request.index)
        await self.store.kept_rows.keep(request)
        return store_pb.KeepRowsResponse()

    async def DescribeKeptRows(
        self, request: store_pb.DescribeKeptRowsRequest, context: Any
    ) -> store_pb.DescribeKeptRowsResponse:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        return await self.store.kept_rows.describe(request.job_id, request.policy)

    async def ReadKeptRows(
        self, request: store_pb.ReadKeptRowsRequest, context: Any
    ) -> AsyncIterator[store_pb.KeptMicroBatch]:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        requests.check_not_negative("version", request.version)
        rows = self.store.kept_rows.read(request.job_id, request.policy, request.version)
        async for batch in rows:
            yield store_pb.KeptMicroBatch.FromString(batch)

    async def FreeKeptRows(
        self, request: store_pb.FreeKeptRowsRequest, context: Any
    ) -> store_pb.FreeKeptRowsResponse:
        requests.check_common(request)
        check_name("policy", request.policy)
        requests.check_not_negative("version", request.version)
        await self.store.kept_rows.free(
            request.job_id, request.policy, request.version, request.checksum
        )
        return store_pb.FreeKeptRowsResponse()

    async def GetStep(
        self, request: store_pb.GetStepRequest, context: Any
    ) -> store_pb.GetStepResponse:
        check_name("job_id", request.job_id)
        requests.check_step(request.step)
        status = await self.store.steps.status(
            request.job_id,
            request.step,
            endings=not request.counts_only,
            queries=request.with_queries,
        )
        return store_pb.GetStepResponse(
            open=status.open,
            sealed=status.sealed,
            query_ids=status.query_ids,
            versions=status.versions,
            ended_trajectory_ids=status.ended_trajectories,
            commits=status.commits,
            counts=status.counts,
            group_size=status.group_size,
            redundant=status.redundant,
            closed=status.open and status.closed,
            cursor=status.cursor,
            queries=status.queries,
            trajectories_ended=status.ended,
        )

    async def WatchTables(
        self, request: store_pb.WatchTablesRequest, context: Any
    ) -> AsyncIterator[store_pb.TableStatus]:
        check_name("job_id", request.job_id)
        async for status in self.store.watching.watch(request.job_id):
            yield status

    async def ListSamples(
        self, request: store_pb.ListSamplesRequest, context: Any
    ) -> store_pb.ListSamplesResponse:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        samples, token = await self.store.samples.page(
            request.job_id,
            request.policy,
            requests.check_step(request.step) if request.HasField("step") else None,
            request.state if request.HasField("state") else None,
            requests.page_size(request.page_size),
            request.page_token,
        )
        return store_pb.ListSamplesResponse(samples=samples, next_page_token=token)

    async def AmendStep(
        self, request: store_pb.AmendStepRequest, context: Any
    ) -> store_pb.AmendStepResponse:
        requests.check_common(request)
        requests.check_step(request.step)
        requests.check_amend(request)
        complete = await self.store.steps.amend(request)
        return store_pb.AmendStepResponse(complete_query_ids=complete)

    async def ReadTaskPools(
        self, request: store_pb.ReadTaskPoolsRequest, context: Any
    ) -> store_pb.ReadTaskPoolsResponse:
        requests.check_common(request)
        requests.check_task_pools(request)
        await self.store.tables.get(request.job_id)
        return await self.store.task_pools.read(request)

    async def DescribeTables(
        self, request: store_pb.DescribeTablesRequest, context: Any
    ) -> store_pb.DescribeTablesResponse:
        check_name("job_id", request.job_id)
        return await self.store.descriptions.describe(request.job_id)

    async def AuditTables(
        self, request: store_pb.AuditTablesRequest, context: Any
    ) -> store_pb.AuditTablesResponse:
        check_name("job_id", request.job_id)
        return await self.store.audit.check(request.job_id)

    async def ReadLog(
        self, request: store_pb.ReadLogRequest, context: Any
    ) -> AsyncIterator[store_pb.LoggedStep]:
        check_name("job_id", request.job_id)
        check_name("policy", request.policy)
        requests.check_not_negative("from_step", request.from_step)
        logged = self.store.audit.read(request.job_id, request.policy, request.from_step)
        async for step in logged:
            yield step

    async def DropTables(
        self, request: store_pb.DropTablesRequest, context: Any
    ) -> store_pb.DropTablesResponse:
        requests.check_common(request)
        await self.store.tables.drop(request.job_id, purge_log=request.purge_log)
        await self.store.task_pools.free(request.job_id)
        self.store.recent.forget(request.job_id)
        return store_pb.DropTablesResponse()


def make_service(settings: StoreSettings, telemetry: Telemetry) -> ExperienceStoreService:
    """Return the service configured by `TROUPE_*`."""
    mark = settings.store_high_water_mib * MIB
    recent = settings.store_recent_mib * MIB
    store = Store(Database(settings.samples_url), high_water_bytes=mark, recent_bytes=recent)
    watch = RedisWatch(store.database, telemetry)
    return ExperienceStoreService(store, Meters(telemetry, store), watch)


def _wait_of(
    request: store_pb.ClaimMicroBatchRequest | store_pb.ExchangePairSumsRequest, context: Any
) -> float:
    """Return the seconds that a call may wait, so that its answer arrives within its deadline."""
    wait, remaining = min(request.wait_seconds, requests.LONGEST_WAIT), context.time_remaining()
    return wait if remaining is None else max(0.0, min(wait, remaining - _DEADLINE_MARGIN))


def _written(answer: object) -> dict[str, Any]:
    """Return the field of an EndingWritten or FillWritten that holds the answer, or its error."""
    if isinstance(answer, TroupeError):
        return {"error": to_status(answer).SerializeToString()}
    return {"response": answer}


def _given(answer: T | TroupeError) -> T:
    if isinstance(answer, TroupeError):
        raise answer
    return answer

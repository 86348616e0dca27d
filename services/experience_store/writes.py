"""Endings and late columns as they come over the wire: many at once, each taken by itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.experience_store import requests
from services.experience_store.meters import Meters
from services.experience_store.records import Ending, Payload
from services.experience_store.rows import check_append
from services.experience_store.samples import SampleFills
from services.experience_store.store import Store
from services.experience_store.trajectories import Append
from troupe import wire
from troupe.rpc import ResourceExhausted, TroupeError
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """A WriteRequest, and where the samples of each of its endings lie in the bytes that came: to
    parse them, or only to copy them, takes longer than all else that is done with them.
    """

    request_id: str
    endings: Sequence[store_pb.AppendTrajectoryRequest]
    """Without their samples."""
    payloads: Sequence[Sequence[Payload]]
    fills: Sequence[store_pb.FillColumnsRequest]

    @staticmethod
    def parse(data: bytes) -> Batch:
        """The batch that `data` is. Raises `DecodeError`."""
        rest, spans = wire.split(data, 0, len(data), store_pb.WriteRequest.ENDINGS_FIELD_NUMBER)
        request = store_pb.WriteRequest.FromString(rest)
        field = store_pb.AppendTrajectoryRequest.SAMPLES_FIELD_NUMBER
        view = memoryview(data)
        endings: list[store_pb.AppendTrajectoryRequest] = []
        payloads: list[list[Payload]] = []
        for span in spans:
            ending, samples = wire.split(data, *span, field)
            endings.append(store_pb.AppendTrajectoryRequest.FromString(ending))
            payloads.append([view[start:end] for start, end in samples])
        return Batch(request.request_id, endings, payloads, request.fills)

    def parts(self) -> bytes:
        """What it consists of: each part has an id that stands for its contents."""
        endings = [part.request_id for part in self.endings]
        return repr((endings, [part.request_id for part in self.fills])).encode()


class Writes:
    """What rollout and whoever scores later writes."""

    def __init__(self, store: Store, meters: Meters) -> None:
        self._store = store
        self._meters = meters

    async def end_each(
        self,
        sent: Sequence[store_pb.AppendTrajectoryRequest],
        payloads: Sequence[Sequence[Payload]] = (),
    ) -> list[store_pb.AppendTrajectoryResponse | TroupeError]:
        """The answers to these calls, or their errors. `payloads`: the samples of each, serialized,
        where the requests came without them.
        """
        known = payloads or [
            [sample.SerializeToString() for sample in request.samples] for request in sent
        ]
        appends = []
        for one in zip(sent, known, strict=True):
            appends.append(_of(_append_of, *one))
            # A call brings rows by the hundred, and a claim or a reward has to wait for its turn at
            # several places: they are answered in between.
            await asyncio.sleep(0)
        for number, append in enumerate(appends):
            if isinstance(append, Append):
                try:
                    size = sum(len(row.payload) for row in append.rows)
                    await self._store.high_water.admit(append.job, append.step, size)
                except TroupeError as error:
                    if isinstance(error, ResourceExhausted):
                        self._meters.pushed_back()
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
        """The answers to these calls, or their errors."""
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
    results: Sequence[tuple[pb.SampleState.ValueType, bool]],
) -> store_pb.FillColumnsResponse:
    """The answer to a fill of so many samples: most are alike. Nobody changes it."""
    (state, accepted), *more = results
    return store_pb.FillColumnsResponse(
        state=state,
        accepted=accepted,
        more=[store_pb.SampleFilled(state=s, accepted=a) for s, a in more],
    )


def _append_of(request: store_pb.AppendTrajectoryRequest, payloads: Sequence[Payload]) -> Append:
    requests.check_common(request)
    requests.check_step(request.step)
    requests.check_id("query_id", request.query_id)
    requests.check_id("trajectory_id", request.trajectory_id)
    rows = check_append(request, payloads)
    state = pb.TrajectoryState.Name(request.state).removeprefix("TRAJECTORY_STATE_")
    reason = requests.clean_reason(request.reason)
    ending = Ending(state, request.request_id, request.query_id, reason)
    return Append(request.job_id, request.step, request.trajectory_id, ending, rows)


def _fills_of(request: store_pb.FillColumnsRequest) -> SampleFills:
    requests.check_step_call(request)
    fills = [requests.check_fill("", request)]
    for index, item in enumerate(request.more):
        fills.append(requests.check_fill(f"more[{index}].", item))
    return SampleFills(request.job_id, request.policy, request.step, fills)

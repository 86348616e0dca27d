"""Weights from rank 0 of a gang of two gloo ranks: gathered bucket by bucket, through the lead."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.trainer.gang.gang import Gangs
from services.trainer.sending import UpdateGroups
from services.trainer.settings import TrainerSettings
from tests.trainer.gang.test_gang import assert_equal, gang_spec, rows_of, together
from troupe.contracts import kinds
from troupe.rpc import Aborted
from troupe.v1 import trainer_pb2 as trainer_pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    settings = TrainerSettings(
        trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=120, gang_start_seconds=900
    )
    some = Gangs(settings)
    yield some
    some.close()


class Reader:
    """The caller: opens the handles as a server does, and leaves when it is told to."""

    def __init__(self, *, leaves_after: int = 10_000) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._left = leaves_after

    def tell(self, event: trainer_pb.SendWeightsEvent) -> None:
        for handle in event.bucket.handles:
            content = pickle.loads(handle)
            flat = content["flattened_tensor"]
            for one in content["metadata"]:
                part = flat[one.start_idx : one.end_idx].reshape(one.shape)
                self.found[one.name] = part.clone()

    def acknowledged(self, seconds: float) -> None:
        self._left -= 1
        if self._left < 0:
            raise Aborted("it left", kind="update_given_up")


def test_the_published_tensors_of_a_gang_are_sent(tokenizer: Path, gangs: Gangs) -> None:
    gang = together(gangs, gang_spec(tokenizer), double=False)
    wanted = trainer_pb.WantedWeights(
        job_id="job", policy="solver", way="ipc", ranks=3, format="sglang"
    )
    groups = UpdateGroups("127.0.0.1", torch.device("cpu"))
    for step in range(2):
        reader = Reader()
        gang.send(wanted, groups, reader)
        assert_equal(reader.found, gang.published())
        # A caller that leaves costs the update, not the gang.
        with pytest.raises(Aborted, match="given up"):
            gang.send(wanted, groups, Reader(leaves_after=step))
        gang.accumulate(rows_of(gang_spec(tokenizer), 6, step))
        assert gang.apply(step).applied
    assert not gang.lost
    gang.release()


class Silent:
    """A caller whose server never joins the group."""

    def tell(self, event: trainer_pb.SendWeightsEvent) -> None:
        pass

    def acknowledged(self, seconds: float) -> None:
        pass


def test_a_server_that_never_joins_costs_the_update_and_not_the_gang(
    tokenizer: Path, gangs: Gangs
) -> None:
    gang = together(gangs, gang_spec(tokenizer), double=False)
    wanted = trainer_pb.WantedWeights(
        job_id="job", policy="solver", way="broadcast", ranks=1, format="sglang"
    )
    groups = UpdateGroups("127.0.0.1", torch.device("cpu"))
    with pytest.raises(Aborted) as failed:
        gang.send(wanted, groups, Silent())
    assert failed.value.kind == kinds.UPDATE_GROUP_FAILED
    assert not gang.lost
    wanted.way = "ipc"
    reader = Reader()
    gang.send(wanted, groups, reader)
    assert_equal(reader.found, gang.published())
    gang.release()

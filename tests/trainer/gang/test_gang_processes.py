"""A gang of two gloo ranks with other losses, broken losses, and missing ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from services.trainer.gang.gang import Gangs, free_port
from services.trainer.gang.learner import GangLearner
from services.trainer.learning.ranks import Stopped
from services.trainer.settings import TrainerSettings
from services.trainer.state.training_state import StateStore, TrainingState
from tests.support.processes import ports_of
from tests.support.waiting import PATIENCE, block_until
from tests.trainer.gang.test_gang import (
    PLAIN,
    alone,
    assert_close,
    assert_equal,
    gang_spec,
    rows_of,
    together,
)
from tests.trainer.gang.test_gang_steps import ranks
from troupe.job import JobSpec
from troupe.rpc import Aborted, DeadlineExceeded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    some = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=60))
    yield some
    some.close()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"normalize": "token"},
        {"normalize": "sequence"},
        {"normalize": "constant"},
        {"loss": "gspo", "normalize": "sequence"},
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "rae"},
        {"advantage": "rloo", "baseline_weight": "trajectory"},
        {"advantage": "gigpo"},
        {"kl_coefficient": 0.3, "kl_in": "reward"},
        {"epochs": 2, "minibatches": 2, "old_logprobs": "recomputed"},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_ranks_weigh_tokens_as_one_device_for_every_normalization(
    tokenizer: Path, gangs: Gangs, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    pipeline = {"mode": "sync", "steps": 10, "queries_per_step": 2, "micro_batch_samples": 4}
    spec = gang_spec(tokenizer, algorithm=algorithm, pipeline=pipeline)
    gang, one = together(gangs, spec), alone(spec)
    if spec.needs_reference:
        store = StateStore(tmp_path, "job", "solver")
        store.save(TrainingState(0, "a" * 32, one.snapshot()))
        for learner in (gang, one):
            learner.load_reference(store.load(0))
    for step in range(2):
        for part in range(3):
            rows = [
                replace(row, sample_id=f"{part}-{row.sample_id}", group=f"{part}-{index % 3}")
                for index, row in enumerate(rows_of(spec, 6, 3 * step + part))
            ]
            for learner in (gang, one):
                learner.accumulate(rows)
        for learner in (gang, one):
            learner.complete()
        ours, theirs = gang.apply(step), one.apply(step)
        assert ours.applied == theirs.applied is True
        for name, value in theirs.metrics.items():
            if name != "train/seconds":
                assert ours.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert_close(gang, one)
    gang.release()


def test_activations_of_sharded_layers_are_computed_again(tokenizer: Path, gangs: Gangs) -> None:
    values = gang_spec(tokenizer).model_dump()
    values["policies"]["solver"]["trainer"]["activation_checkpointing"] = True
    spec = JobSpec.model_validate(values)
    gang, one = together(gangs, spec), alone(gang_spec(tokenizer))
    rows = rows_of(spec, 7, 0)
    for learner in (gang, one):
        learner.accumulate(rows)
        assert learner.apply(0).applied
    assert_close(gang, one)
    gang.release()


def test_a_step_that_fails_on_one_rank_is_skipped_on_all(tokenizer: Path, gangs: Gangs) -> None:
    spec = gang_spec(tokenizer)
    gang = together(gangs, spec)
    weights, moments = gang.weights(), gang.moments()
    good = rows_of(spec, 6, 0)
    # A row of one rank has log-probs that are NaN; the other rank's loss is finite.
    bad = next(i for i, row in enumerate(good) if row.reward < np.mean(row.group_rewards))
    wild = list(good)
    wild[bad] = replace(good[bad], behaviour=np.full_like(good[bad].behaviour, np.nan))
    gang.accumulate(wild)
    gang.accumulate(good)
    applied = gang.apply(0)
    assert not applied.applied
    assert applied.reason.endswith("is not finite, so the loss is not")
    assert applied.metrics["samples"] == 12
    assert_equal(gang.weights(), weights)
    assert_equal(gang.moments(), moments)
    gang.accumulate(good)
    assert gang.apply(0).applied
    gang.release()


def test_a_long_micro_batch_stops_between_its_passes(tokenizer: Path, gangs: Gangs) -> None:
    spec = gang_spec(tokenizer)
    gang = together(gangs, spec)
    rows = [replace(row, sample_id=f"s{i}") for i, row in enumerate(rows_of(spec, 20, 0) * 200)]
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped):
        gang.accumulate(rows, stop)
    gang.discard()
    gang.accumulate(rows[:20])
    assert gang.apply(0).metrics["samples"] == 20
    gang.release()


def test_a_rank_that_hangs_is_noticed_at_its_deadline(tokenizer: Path) -> None:
    others = ranks(os.getpid())  # of the module's gang
    gangs = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_timeout_seconds=30))
    spec = gang_spec(tokenizer)
    try:
        gang = together(gangs, spec)
        weights, rows = gang.weights(), rows_of(spec, 6, 0)
        own = [one for one in ranks(os.getpid()) if one not in others]
        (last,) = [one for one in own if one.environ()["RANK"] == "1"]
        last.send_signal(signal.SIGSTOP)
        with pytest.raises(Aborted) as lost:
            gang.accumulate(rows)
        assert lost.value.kind == "gang_lost"
        assert gang.lost
        gang.restore(weights, {})
        assert_equal(gang.weights(), weights)
    finally:
        gangs.close()


def test_missing_ranks_are_counted_in_the_error(tokenizer: Path) -> None:
    others = {rank.pid for rank in ranks(os.getpid())}  # of the module's gang

    def hold_back() -> None:
        late: list[psutil.Process] = []
        while not late:
            fresh = [rank for rank in ranks(os.getpid()) if rank.pid not in others]
            late = [rank for rank in fresh if rank.environ().get("RANK") == "1"]
        late[0].send_signal(signal.SIGSTOP)

    gangs = Gangs(TrainerSettings(trainer_device="cpu", gang_ranks=2, gang_start_seconds=60))
    threading.Thread(target=hold_back, daemon=True).start()
    with pytest.raises(DeadlineExceeded) as waited:
        together(gangs, gang_spec(tokenizer))
    assert waited.value.kind == "gang_incomplete"
    assert waited.value.message.startswith("1 of 2 ranks")
    assert {rank.pid for rank in ranks(os.getpid())} <= others
    gangs.close()


def test_a_missing_host_is_waited_for_until_a_deadline(tokenizer: Path) -> None:
    settings = TrainerSettings(
        gang_ranks=1,
        gang_nodes=2,
        gang_endpoint=f"127.0.0.1:{free_port('127.0.0.1')}",
        gang_start_seconds=8,
    )
    with pytest.raises(DeadlineExceeded, match="once all 2 hosts are there"):
        together(Gangs(settings), gang_spec(tokenizer))


@pytest.mark.slow
def test_the_first_host_of_an_allocation_leads(tmp_path: Path) -> None:
    """The same command on all hosts: on host 0 it is a trainer worker."""
    ports = tmp_path / "ports"
    environment = {
        **os.environ,
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "0",
        "TROUPE_PORT_FILE": str(ports),
        "TROUPE_DATA_DIR": str(tmp_path),
        "TROUPE_TRANSFER_DIR": str(tmp_path / "transfer"),
    }
    lead = subprocess.Popen([sys.executable, "-m", "services.trainer.gang"], env=environment)
    try:
        ports_of(lead, ports)
    finally:
        lead.terminate()
        assert lead.wait(PATIENCE) == 0


def test_two_hosts_are_one_gang(tokenizer: Path) -> None:
    """A lead and a follower, which also joins the next gang."""
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = {
        **os.environ,
        # Number and count as LeaderWorkerSet tells a pod; its port may be taken here.
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "TROUPE_GANG_ENDPOINT": endpoint,
        "TROUPE_GANG_RANKS": "1",
        "TROUPE_GANG_TIMEOUT_SECONDS": str(PATIENCE),
    }
    follower = subprocess.Popen([sys.executable, "-m", "services.trainer.gang"], env=environment)
    gangs = Gangs(
        TrainerSettings(
            gang_ranks=1, gang_nodes=2, gang_endpoint=endpoint, gang_timeout_seconds=PATIENCE
        )
    )
    spec = gang_spec(tokenizer)
    try:
        gang, one = together(gangs, spec), alone(spec)
        rows = rows_of(spec, 6, 0)
        for learner in (gang, one):
            learner.accumulate(rows)
            assert learner.apply(0).applied
        assert_close(gang, one)
        # Another policy, with all its weights on each host that the lead counts.
        counted: list[int] = []

        def replicas_on(hosts: int) -> int:
            counted.append(hosts)
            return hosts

        other = GangLearner(
            gangs,
            "job/other",
            spec,
            "solver",
            {"double": True, **PLAIN},
            replicas_on=replicas_on,
        )
        other.accumulate(rows)
        assert other.apply(0).applied
        assert_close(other, one)
        assert counted == [2]
        weights, moments = gang.weights(), gang.moments()
        gangs.close()
        with pytest.raises(Aborted):
            gang.accumulate(rows)
        gang.restore(weights, moments)
        assert_equal(gang.weights(), weights)
    finally:
        gangs.close()
        follower.terminate()
        assert follower.wait(PATIENCE) == 0


# A name server that never answers: Python imports `sitecustomize` when it starts.
_NO_ANSWER = """
import pathlib, socket, time
found = socket.getaddrinfo
def getaddrinfo(host, *others, **named):
    if host == "lead.invalid":
        pathlib.Path({asked!r}).touch()
        time.sleep(3600)
    return found(host, *others, **named)
socket.getaddrinfo = getaddrinfo
"""


def test_a_follower_that_looks_its_lead_up_ends_on_sigterm(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "sitecustomize.py").write_text(_NO_ANSWER.format(asked=str(asked)))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "TROUPE_GANG_NODE": "1",
        "TROUPE_GANG_NODES": "2",
        "TROUPE_GANG_RANKS": "1",
        "TROUPE_GANG_ENDPOINT": "lead.invalid:29500",
        "TROUPE_DATA_DIR": str(tmp_path / "data"),
    }
    follower = subprocess.Popen([sys.executable, "-m", "services.trainer.gang"], env=environment)
    try:
        block_until(asked.exists)
        follower.terminate()
        assert follower.wait(PATIENCE) == 0
    finally:
        follower.kill()

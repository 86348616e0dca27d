"""A payload from a workflow's message to the trainer's pass, through a store that is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.requests import EngineResponse
from services.rollout.engines.turns import EngineTurn
from services.rollout.trajectories.records import LargeColumns, samples_of
from services.trainer.claims import Values, last_refs
from services.trainer.learning.forward import Forward
from services.trainer.learning.learner import Learner
from services.trainer.learning.samples import Row
from services.trainer.learning.sequences.packing import PassCosts, plan
from services.trainer.state.suspension import pack_rows, unpack_rows
from tests.experience_store.test_store_process import Process
from tests.support.experience_client import Client
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.seeing_model import (
    KIND,
    TOKENS,
    SeeingConfig,
    SeeingModel,
    payload,
    seeing_config,
    stand_ins,
)
from tests.support.training import VOCABULARY, make_rollout, make_spec, save_tokenizer
from troupe.contracts.payloads import INLINE_BYTES, Payload, PayloadKinds, PlacedPayload
from troupe.job import JobSpec
from troupe.prefixes import restore, share
from troupe.rpc import ClientSettings, FailedPrecondition, connect, new_id
from troupe.transfer import Transfer
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import Agents, Sampling
from troupe.workflow.backend import GeneratedTurn
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.samples import rows_of
from troupe.workflow.turns import Role

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class SeeingEngine(ScriptedEngine):
    """Draws the likeliest tokens of the model."""

    payload_kinds: ClassVar[PayloadKinds] = {KIND: stand_ins}

    def __init__(self, model: Any, spec: JobSpec) -> None:
        super().__init__(Script(lambda ids: []), "engine", "solver", spec.policies["solver"])
        self._model = model
        self.vocabulary, self.max_context = VOCABULARY, 1024
        self._life.started()
        self._life.updating(0)
        self._life.verified(0, "checksum")

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        payloads = turn.prompt_ids.payloads
        while turn.remaining:
            ids = torch.tensor([[*turn.prompt_ids, *turn.token_ids]])
            with torch.no_grad():
                logits = self._model(ids, payloads=payloads, use_cache=False).logits[0, -1]
            logprobs = torch.log_softmax(logits.float(), -1)
            turn.append(int(logprobs.argmax()), float(logprobs.max()), 0)
        return turn.result()


class EngineBackend:
    """Generates every turn with one engine."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    async def generate(
        self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> GeneratedTurn:
        return await self._engine.generate(new_id(), prompt_ids, sampling, deadline_seconds=60)


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    directory = save_tokenizer(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    return ChatTokenizer(tokenizer)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = seeing_config()
    del config["model_type"]
    return SeeingModel(SeeingConfig(**config)).eval()


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[Process]:
    store = Process(redis_url, tmp_path)
    await store.start()
    yield store
    store.end(signal.SIGKILL)


async def play(agents: Agents, seen: Sequence[Payload]) -> None:
    """Two turns of one conversation, each with a different payload."""
    first = {"role": "user", "content": ["look", seen[0]]}
    said = await agents["solver"].chat([first])
    then = {"role": "user", "content": [seen[1], "now?"]}
    await agents["solver"].chat([first, said, then])


async def test_a_payload_is_trained_once_as_the_engine_saw_it_although_the_store_dies(
    store: Process, tmp_path: Path, chat: ChatTokenizer, model: Any
) -> None:
    spec = make_spec(tmp_path / "tokenizer")
    channel = connect(f"127.0.0.1:{store.port}", ClientSettings())
    client = Client(channel)
    transfer = Transfer(tmp_path / "transfer")
    await client.create()
    await client.stub.OpenStep(client.open_request())
    role = Role(
        "solver",
        "solver",
        chat,
        Sampling(max_new_tokens=4),
        payload_kinds=SeeingEngine.payload_kinds,
    )

    # From the workflow to the store.
    large = payload(9, INLINE_BYTES + 1)
    for number, seen in enumerate([(payload(1), payload(2)), (payload(3), large)]):
        agents = Agents({"solver": role}, EngineBackend(SeeingEngine(model, spec)), seed=number)
        await play(agents, seen)
        rows = rows_of(
            agents.close(),
            query_id="q0",
            trajectory_id=f"q0-t{number}",
            trained={"solver"},
            rewards={"solver": float(number)},
            group_by="turn",
        )
        shelf = LargeColumns(transfer, client.job)
        ticket = rollout_pb.Ticket(query_id="q0", trajectory_id=f"q0-t{number}")
        samples = samples_of(rows, ticket=ticket, shelf=shelf)
        # The second turn begins with the first: each payload is stored once.
        assert [len(sample.payloads) for sample in samples] == [1, 1]
        assert samples[1].HasField("stem")
        await shelf.put()
        request = client.append_request("q0", f"q0-t{number}", samples=samples)
        assert (await client.stub.AppendTrajectory(request)).accepted
        store.end(signal.SIGKILL)
        await store.start()
        assert (await client.stub.AppendTrajectory(request)).accepted

    # From the store to the trainer.
    asked = client.claim_request()
    claim = await client.stub.ClaimMicroBatch(asked)
    store.end(signal.SIGKILL)
    await store.start()
    again = await client.stub.ClaimMicroBatch(asked)
    assert list(again.samples) == list(claim.samples)
    whole = restore(again.samples, again.stems)
    values = Values(lambda key, seconds: transfer.get(key)[0]["value"].numpy(), 0.0)
    learner = Learner(model, spec, "solver")
    rows, gone = values.read(whole, learner.read)
    assert not gone
    seen = {row.sample_id: [one.payload for one in row.payloads] for row in rows}
    assert seen["q0_1_q0-t0"] == [payload(1), payload(2)]
    assert seen["q0_1_q0-t1"] == [payload(3), large]
    assert seen["q0_1_q0-t1"][1].data == large.data

    # The data kept to recompute the step contains the contents themselves.
    kept = restore(share(values.with_values(whole)))
    assert [[one.digest for one in item.sample.payloads] for item in kept] == [
        [one.digest for one in item.sample.payloads] for item in whole
    ]
    assert all(one.HasField("data") for item in kept for one in item.sample.payloads)

    # A suspended trainer writes its rows, and a gang's leader sends them.
    tensors, described = pack_rows(rows)
    unpacked = unpack_rows(tensors, json.loads(json.dumps(described)))
    assert [row.payloads for row in unpacked] == [row.payloads for row in rows]

    for how in ({"packed": False}, {}, {"sharing": PassCosts(1.0, 0.0)}):
        assert_scores_as_drawn(model, rows, **how)
    learner.accumulate(rows)
    learner.complete()
    assert learner.apply(0).applied

    commit = await client.stub.CommitStep(client.commit_request(again.claim_id))
    assert commit.commit.num_samples == 4
    audit = await client.stub.AuditTables(store_pb.AuditTablesRequest(job_id=client.job))
    (table,) = audit.policies
    assert (table.trained, table.lost, table.duplicated) == (4, 0, 0)
    keys = set(last_refs(again, 1))
    assert len(keys) == 1
    assert all(transfer.exists(key) for key in keys)
    await channel.close(None)


def assert_scores_as_drawn(model: Any, rows: Sequence[Row], **how: Any) -> None:
    """A pass has the log-probs that the engine reported, and others without the payloads."""
    forward = Forward(model)
    behaviour = np.concatenate([row.behaviour for row in rows])
    found = np.zeros_like(behaviour)
    blind = np.zeros_like(behaviour)
    for batch in plan(rows, 1 << 12, **how):
        temperatures = torch.ones(len(batch.targets), 1)
        found[batch.order] = forward.scores(batch, temperatures).logprobs.numpy()
        object.__setattr__(batch, "payloads", ())
        blind[batch.order] = forward.scores(batch, temperatures).logprobs.numpy()
    np.testing.assert_allclose(found, behaviour, atol=1e-4)
    assert np.abs(blind - behaviour).max() > 1e-2


def test_a_model_that_takes_no_payloads_refuses_rows_with_some(tmp_path: Path, model: Any) -> None:
    learner = Learner(model, make_spec(save_tokenizer(tmp_path / "tokenizer")), "solver")
    sample = make_rollout("q0", "t")
    sample.payloads.add(kind="image", digest=payload(1).digest, tokens=1, data=payload(1).data)
    with pytest.raises(FailedPrecondition, match="takes no payload of kind image"):
        learner.read([store_pb.ClaimedSample(sample=sample)], lambda key: np.zeros(0))


def test_rows_with_payloads_are_not_cut(model: Any) -> None:
    row = Row("s", np.full(50, 5), 45, np.zeros(5, np.float32), 1.0, (1.0,), 0)
    object.__setattr__(row, "payloads", (PlacedPayload(payload(1), 2, TOKENS),))
    with pytest.raises(FailedPrecondition, match="longer than a pass"):
        plan([row], 32, cut=32)

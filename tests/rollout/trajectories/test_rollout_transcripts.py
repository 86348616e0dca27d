"""Which conversations are sent to the orchestrator for people to read, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.trajectories.transcripts import transcript_of
from tests.rollout.house import House, evaluation, make_spec, training
from troupe.contracts.conversations import repeat_shared
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import ScriptedPolicy, TurnRecord, play

Prompt = list[dict[str, str]]


def played(prompts: Sequence[tuple[str, Prompt]], reply: str = "r") -> list[TurnRecord]:
    """The turns of a workflow that asks agents with these prompts, one after another."""

    async def workflow(query: Any, agents: Any, tools: Any) -> dict[str, float]:
        for agent, prompt in prompts:
            await agents[agent].chat(prompt)
        return {agent: 0.0 for agent, _ in prompts}

    done = play(workflow, {"question": "?"}, policy=ScriptedPolicy(reply))
    return asyncio.run(done).turns


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": st.sampled_from("xyz")}
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), MESSAGES), min_size=1, max_size=6))
def test_every_prompt_comes_back_whole(prompts: list[tuple[str, Prompt]]) -> None:
    turns = played(prompts)
    sent = transcript_of(turns)
    repeat_shared(sent)
    assert [
        (one.agent, [(m.role, m.content) for m in one.messages], one.response) for one in sent
    ] == [(one.role.name, list(one.messages), "r") for one in turns]
    assert all(one.shared_messages == one.shared_turn == 0 for one in sent)


def test_a_conversation_is_sent_once() -> None:
    """Bytes grow linearly with the conversation, not quadratically."""
    history: Prompt = []
    prompts: list[tuple[str, Prompt]] = []
    for turn in range(20):
        history.append({"role": "user", "content": f"{turn:02} " + "u" * 1000})
        prompts.append(("a", list(history)))
        history.append({"role": "assistant", "content": "r" * 1000})
    sent = rollout_pb.TrajectoryEvent(turns=transcript_of(played(prompts, "r" * 1000)))
    # Each reply is a response, and a message of the next prompt.
    assert sent.ByteSize() < 1.1 * 20 * 3000
    repeat_shared(sent.turns)
    assert sent.ByteSize() > 19 * 19 * 1000


def with_text(events: dict[str, rollout_pb.TrajectoryEvent]) -> set[str]:
    """The trajectories whose texts came; of the others all numbers did."""
    for event in events.values():
        assert len(event.turns) == 1
        assert event.turns[0].response_tokens > 0
        has = bool(event.turns[0].messages) and bool(event.turns[0].response)
        assert has != event.without_text
    return {name for name, event in events.items() if not event.without_text}


async def test_texts_come_of_a_bounded_share(house: House) -> None:
    spec = make_spec("one_turn", logging={"trajectories": 2}, pipeline={"group_size": 40})
    spec["pipeline"]["queries_per_step"] = 2
    await house.prepare_raw(spec)
    await house.open_step(group_size=40)
    events = await house.run(training(2, 40))
    kept = with_text(events)
    tokens = {name for name in events if name.startswith("q0-") and int(name[7:]) < 8}
    assert tokens <= kept, "what people see the tokens of has its text"
    assert len(kept - tokens) < 12, "two of eighty on average"
    # The first ones of an evaluation, and the ones by which evaluations are compared.
    assert with_text(await house.run(evaluation(8))) == {f"h{n}-e0-t0" for n in range(4)}


async def test_texts_of_failed_trajectories_come_first(house: House) -> None:
    spec = make_spec("one_turn", logging={"trajectories": 3}, pipeline={"group_size": 40})
    spec["pipeline"]["queries_per_step"] = 1000
    spec["workflow"] = "tests.rollout.worlds:says_and_fails"
    await house.prepare_raw(spec)
    await house.open_step(queries=3, group_size=10)
    tickets = [one for one in training(3, 10) if one.query_id != "q0"]
    events = await house.run(tickets)
    assert {event.state for event in events.values()} == {common_pb.TRAJECTORY_STATE_FAILED}
    assert 3 <= len(with_text(events)) <= 5

"""How trajectories are kept for looking at."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.state.trajectories import TrajectoryFilter, pack, take_tokens, unpack
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


def conversation(
    turns: int, characters: int, seed: int = 0
) -> orchestrator_pb.GetTrajectoryResponse:
    """Turns that each repeat the history; the text itself does not compress well."""
    rng = random.Random(seed)
    full = orchestrator_pb.GetTrajectoryResponse()
    full.summary.trajectory_id = "t"
    history: list[str] = []
    for number in range(turns):
        history.append("".join(chr(rng.randrange(33, 0x3000)) for _ in range(characters)))
        turn = full.turns.add(agent="solver", turn=number, response=history[-1][:characters])
        for text in history:
            turn.messages.add(role="user", content=text)
    return full


@given(st.integers(0, 6), st.integers(0, 3000))
def test_a_packed_conversation_unpacks_to_the_same(turns: int, characters: int) -> None:
    full = conversation(turns, characters)
    packed = pack(full)
    assert len(packed) <= len(full.SerializeToString()) + 1
    assert unpack(packed) == full


def test_a_huge_conversation_is_cut_and_says_so() -> None:
    full = conversation(4, 100_000)
    assert full.ByteSize() > 2**21
    packed = pack(full)
    assert len(packed) < 2**18
    shown = unpack(packed)
    assert "98,000 characters ..." in shown.turns[0].response
    assert len(shown.turns) == 4
    assert full.turns[0].response == full.turns[0].messages[0].content, "the original is untouched"


def test_tokens_are_stored_apart_from_the_conversation() -> None:
    full = conversation(2, 10)
    full.turns[1].tokens.ids.extend([5, 6])
    full.turns[1].tokens.texts.extend(["a", "b"])
    kept = unpack(take_tokens(full))
    assert [turn.turn for turn in kept.turns] == [1]
    assert list(kept.turns[0].tokens.texts) == ["a", "b"]
    assert not any(turn.HasField("tokens") for turn in full.turns)
    assert take_tokens(full) == b""


def test_a_filter_wants_all_that_is_given() -> None:
    full = orchestrator_pb.GetTrajectoryResponse()
    full.summary.step, full.summary.reason = 3, "deadline: too late"
    full.summary.rewards.update({"solver": 1.0, "checker": 0.0})
    full.turns.add(agent="critic", response="The Answer is 4")

    def found(**given: object) -> bool:
        wanted = TrajectoryFilter(orchestrator_pb.ListTrajectoriesRequest(**given))  # type: ignore[arg-type]
        assert wanted.given == bool(given)
        return wanted.fits(full.summary) and wanted.reads_in(full)

    assert found()
    assert found(text="answer IS", agent="critic", reason="Too late", from_step=3, to_step=3)
    assert not found(text="5")
    assert not found(agent="nobody")
    assert not found(reason="timeout")
    assert not found(from_step=4)
    assert not found(to_step=2)
    # Of the team, else the mean over agents; of an agent where one is named.
    assert found(min_reward=0.5, max_reward=0.5)
    assert found(agent="solver", min_reward=1.0)
    assert not found(agent="checker", min_reward=0.5)
    assert not found(agent="critic", min_reward=-1.0), "it has no reward"
    full.summary.rewards["team"] = -1.0
    assert not found(min_reward=0.0)

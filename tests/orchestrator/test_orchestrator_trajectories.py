"""How trajectories are kept for looking at."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.state.trajectories import pack, unpack
from troupe.v1 import orchestrator_pb2 as orch


def conversation(turns: int, characters: int, seed: int = 0) -> orch.GetTrajectoryResponse:
    """Turns that each repeat the history; the text itself does not compress well."""
    rng = random.Random(seed)
    full = orch.GetTrajectoryResponse()
    full.summary.trajectory_id = "t"
    history: list[str] = []
    for number in range(turns):
        history.append("".join(chr(rng.randrange(33, 0x3000)) for _ in range(characters)))
        turn = full.turns.add(agent="solver", turn=number, response=history[-1][:characters])
        for text in history:
            turn.messages.add(role="user", content=text)
    return full


@given(st.integers(0, 6), st.integers(0, 3000))
def test_what_is_packed_comes_back(turns: int, characters: int) -> None:
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

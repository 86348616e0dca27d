"""How trajectories are kept for looking at."""

import asyncio
import random
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.state.trajectories import KeptTrajectories, take_tokens
from tests.support.waiting import PATIENCE
from troupe.contracts import conversations
from troupe.contracts.conversations import ConversationLog, TrajectoryFilter, pack, unpack
from troupe.rpc import InvalidArgument, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import rollout_pb2 as rollout_pb


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
    kept = orchestrator_pb.GetTrajectoryResponse.FromString(zlib.decompress(take_tokens(full)))
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
        return wanted.fits(full.summary) and wanted.reads_in(full)

    assert found()
    assert found(text="answer IS", agent="critic", reason="Too late", from_step=3, to_step=3)
    assert not found(text="5")
    assert not found(agent="nobody")
    assert not found(reason="timeout")
    assert not found(from_step=4)
    assert not found(to_step=2)
    assert found(evaluation=False, failed=True)
    assert not found(evaluation=True)
    full.summary.state = common_pb.TRAJECTORY_STATE_COMPLETED
    assert found(evaluation=False)
    assert not found(failed=True)
    # Of the team, else the mean over agents; of an agent where one is named.
    assert found(min_reward=0.5, max_reward=0.5)
    assert found(agent="solver", min_reward=1.0)
    assert not found(agent="checker", min_reward=0.5)
    assert not found(agent="critic", min_reward=-1.0), "it has no reward"
    full.summary.rewards["team"] = -1.0
    assert not found(min_reward=0.0)


ALL = TrajectoryFilter(orchestrator_pb.ListTrajectoriesRequest())


def told(step: int, name: str, text: str = "") -> orchestrator_pb.GetTrajectoryResponse:
    full = orchestrator_pb.GetTrajectoryResponse()
    full.summary.trajectory_id, full.summary.step = name, step
    full.turns.add(agent="solver", response=text)
    return full


def listed(log: ConversationLog, size: int = 1000) -> list[str]:
    """All ids, read in pages of `size`."""
    names: list[str] = []
    token = ""
    while True:
        page = log.page(size, token, ALL)
        names += [one.trajectory_id for one in page.summaries]
        token = page.token
        if not token:
            return names


def test_a_log_lists_the_newest_step_first_in_pages_of_any_size(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path / "log", 10_000)
    for step in range(40):
        log.append([told(step, f"s{step}-{n}", "x" * 20) for n in range(2)])
    assert len(list((tmp_path / "log").iterdir())) > 1
    names = listed(log)
    assert names == [f"s{step}-{n}" for step in range(39, -1, -1) for n in (1, 0)]
    for size in (1, 7, 80):
        assert listed(log, size) == names
    assert log.get("s3-1").turns[0].response == "x" * 20
    with pytest.raises(NotFound):
        log.get("s40-0")
    with pytest.raises(InvalidArgument, match="page_token"):
        log.page(5, "s40-0", ALL)


def test_a_log_keeps_its_bound_at_ten_thousand_long_conversations(tmp_path: Path) -> None:
    """In proportion: 32,000 tokens of text each, and a 32nd of the bound."""
    bound = 32 * 2**20
    log = ConversationLog(tmp_path, bound)
    long = conversation(1, 40_000)
    assert 100_000 < len(pack(long)) < 2**18
    for step in range(50):
        found = []
        for number in range(100):
            one = orchestrator_pb.GetTrajectoryResponse(turns=long.turns)
            one.summary.trajectory_id, one.summary.step = f"s{step}-{number}", step
            found.append(one)
        log.append(found[: 100 if step in (0, 49) else 4])
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert size < bound * 1.5 + 2**20
    names = listed(log)
    assert names[0].startswith("s49-")
    assert not any(name.startswith("s0-") for name in names)


def test_pinned_conversations_stay_while_they_take_an_eighth(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path, 16_000)
    log.append([told(0, "first")], pinned=True)
    for step in range(200):
        log.append([told(step, f"s{step}", str(random.Random(step).random()) * 20)])
    names = listed(log)
    assert names[0] == "s199"
    assert names[-1] == "first"
    assert "s0" not in names
    log.append([told(0, "large", "x" * 4_000)], pinned=True)
    for step in range(200):
        log.append([told(step, f"again{step}", str(random.Random(step).random()) * 20)])
    assert "large" not in listed(log)
    assert listed(log)[-1] == "first"


def test_an_incomplete_end_of_a_file_costs_only_what_it_held(tmp_path: Path) -> None:
    ConversationLog(tmp_path, 10**6).append([told(0, "whole"), told(1, "torn", "text")])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    after = ConversationLog(tmp_path, 10**6)  # the orchestrator that comes after the crash
    after.append([told(1, "torn", "again"), told(2, "next")])
    assert listed(after) == ["next", "torn", "whole"]
    assert after.get("torn").turns[0].response == "again"


def test_a_trajectory_written_again_is_listed_once_as_it_is_now(tmp_path: Path) -> None:
    ConversationLog(tmp_path, 10**6).append([told(0, "a", "old"), told(0, "b")])
    again = ConversationLog(tmp_path, 10**6)
    again.append([told(0, "a", "new")])
    assert sorted(listed(again, 1)) == ["a", "b"]
    assert again.get("a").turns[0].response == "new"
    assert sorted(one.summary.trajectory_id for one in again.find(["a", "b", "c"])) == ["a", "b"]


def test_a_search_that_reads_much_ends_its_page_early(tmp_path: Path) -> None:
    log = ConversationLog(tmp_path, 10**7)
    log.append([told(n, f"t{n}", "needle" if n == 0 else "hay") for n in range(2500)])
    wanted = TrajectoryFilter(orchestrator_pb.ListTrajectoriesRequest(text="NEEDLE"))
    page, pages = log.page(10, "", wanted), 1
    while page.token:
        assert page.summaries == []
        page, pages = log.page(10, page.token, wanted), pages + 1
    assert [one.trajectory_id for one in page.summaries] == ["t0"]
    assert pages == 3


async def test_conversations_whose_writer_is_cancelled_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation cancels the task that shows its progress and writes what has ended so far."""
    begun, goes_on, append = threading.Event(), threading.Event(), conversations._append

    def slowly(path: Path, data: bytes) -> int:
        begun.set()
        assert goes_on.wait(PATIENCE)
        return append(path, data)

    monkeypatch.setattr(conversations, "_append", slowly)
    kept = KeptTrajectories(None, None, tmp_path, max_bytes=2**20, tokens_cap=0)  # type: ignore[arg-type]
    buffer = kept.buffer("job", 0, "evaluate")
    buffer.add(rollout_pb.TrajectoryEvent(query_id="q", trajectory_id="early"))
    progress = asyncio.create_task(buffer.flush())
    await asyncio.to_thread(begun.wait, PATIENCE)
    progress.cancel()
    await asyncio.wait([progress])
    assert progress.cancelled()
    buffer.add(rollout_pb.TrajectoryEvent(query_id="q", trajectory_id="late"))
    last = asyncio.create_task(buffer.flush())
    goes_on.set()
    await last
    found = await kept.page(orchestrator_pb.ListTrajectoriesRequest(job_id="job"), 10)
    assert [one.trajectory_id for one in found.summaries] == ["late", "early"]

    # One that is cancelled before its thread begins has taken them, too.
    buffer.add(rollout_pb.TrajectoryEvent(query_id="q", trajectory_id="later"))
    progress = asyncio.create_task(buffer.flush())
    await asyncio.sleep(0)
    progress.cancel()
    await asyncio.wait([progress])
    await buffer.flush()
    found = await kept.page(orchestrator_pb.ListTrajectoriesRequest(job_id="job"), 10)
    assert [one.trajectory_id for one in found.summaries] == ["later", "late", "early"]

"""`engine.cache: keep`: turns go on with their keys and values; and the ways of weights."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.errors import EngineStartFailed
from services.rollout.engines.sglang.engine import SglangEngine
from tests.rollout.engines.asking import ask, prompt
from tests.rollout.engines.models import (
    CONFIG,
    make_model,
    policy_spec,
    publish,
    publish_tensors,
    reference_logprobs,
    transfer_in,
)
from tests.support.fake_sglang import FakeSglang, serve
from tests.support.waiting import until
from troupe.job import EngineSpec
from troupe.transfer import Transfer
from troupe.transfer.formats.sglang import payloads


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return transfer_in(tmp_path)


def continued(
    old: PreTrainedModel, new: PreTrainedModel, ids: list[int], known: int, drawn: list[int]
) -> list[float]:
    """Log-probs by `new` of `drawn` after `ids`, whose first `known` tokens were read by `old`."""
    with torch.no_grad():
        cache = old(torch.tensor([ids[:known]]), use_cache=True).past_key_values
        rest = torch.tensor([[*ids[known:], *drawn[:-1]]])
        logits = new(rest, past_key_values=cache, use_cache=True).logits[0, -len(drawn) :]
    table = torch.log_softmax(logits, dim=-1)
    return [float(table[at, token]) for at, token in enumerate(drawn)]


async def test_turns_go_on_with_their_cache_and_new_ones_begin_afresh(transfer: Transfer) -> None:
    old, new = make_model(0), make_model(1)
    engine = EmbeddedEngine("e0", "solver", policy_spec(cache="keep"))
    await engine.start()
    await engine.update_weights(publish(transfer, old, 0), transfer)
    ids = prompt(random.Random(3), 40, 40)
    task = asyncio.ensure_future(ask(engine, "r", ids, max_new_tokens=150))
    await until(lambda: engine.load().generated_tokens >= 20)
    await engine.update_weights(publish(transfer, new, 1), transfer)
    # It begins while the other goes on, with the same prompt.
    later = await ask(engine, "later", ids, max_new_tokens=40)
    answer = await task
    first, second = answer.versions
    assert (first.version, second.version, second.end) == (0, 1, 150)
    at = first.end
    tokens = list(answer.token_ids)
    wanted = reference_logprobs(old, ids, tokens)
    assert answer.logprobs[:at] == pytest.approx(wanted[:at], abs=2e-4)
    # The token before had been drawn, and not been read.
    expected = continued(old, new, [*ids, *tokens[:at]], len(ids) + at - 1, tokens[at:])
    assert answer.logprobs[at:] == pytest.approx(expected, abs=5e-4)
    recomputed = reference_logprobs(new, ids, tokens)
    assert answer.logprobs[at:] != pytest.approx(recomputed[at:], abs=1e-2)
    for fresh in (later, await ask(engine, "last", [*ids, *tokens], max_new_tokens=8)):
        assert {span.version for span in fresh.versions} == {1}
    assert later.cached_tokens == 0
    expected = reference_logprobs(new, ids, list(later.token_ids))
    assert later.logprobs == pytest.approx(expected, abs=2e-4)
    expected = reference_logprobs(new, [*ids, *tokens], list(fresh.token_ids))
    assert fresh.logprobs == pytest.approx(expected, abs=2e-4)
    await engine.stop()


async def test_a_cache_that_cannot_be_kept_is_refused() -> None:
    async with serve(old := FakeSglang(CONFIG, old=True)) as url:
        spec = policy_spec(kind="sglang", urls=[url], cache="keep")
        with pytest.raises(EngineStartFailed, match=r"engine\.cache = keep"):
            await SglangEngine("e0", "solver", spec).start()
    assert old.seen
    with pytest.raises(ValidationError, match="in_flight: restart"):
        EngineSpec(cache="keep", in_flight="restart")


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    fake = FakeSglang(CONFIG)
    async with serve(fake):
        yield fake


async def served(fake: FakeSglang, **engine: Any) -> SglangEngine:
    url = f"http://127.0.0.1:{fake.server.port}"
    made = SglangEngine("e0", "solver", policy_spec(kind="sglang", urls=[url], **engine))
    await made.start()
    return made


async def test_a_server_pauses_in_place_and_shares_prefixes_within_a_version(
    fake: FakeSglang, transfer: Transfer
) -> None:
    engine = await served(fake, cache="keep")
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    task = asyncio.ensure_future(ask(engine, "r", [1, 2, 3], max_new_tokens=60))
    await until(lambda: any(len(call.tokens) > 3 for call in fake.calls.values()))
    fake.seen.clear()
    await engine.update_weights(publish(transfer, make_model(1), 1), transfer)
    assert "/flush_cache" not in fake.seen
    assert fake.modes[-1] == "in_place"
    assert [span.version for span in (await task).versions] == [0, 1]
    await ask(engine, "next", [1, 2, 3])
    keys = {body.get("rid", ""): body.get("extra_key") for body in fake.bodies}
    assert [key for rid, key in keys.items() if rid.startswith(("r", "next"))] == ["v0", "v1"]
    assert {key for rid, key in keys.items() if rid.startswith("probe")} == {None}
    await engine.stop()


def left_in(directory: Path) -> list[Path]:
    """Files in the directories of processes, but for their locks."""
    return list(directory.glob("*/*/*"))


async def test_a_server_reads_the_published_file_where_it_lies(
    fake: FakeSglang, transfer: Transfer
) -> None:
    (root,) = transfer.roots
    engine = await served(fake)
    for version in (0, 1):
        state = dict(make_model(version).state_dict())
        both = publish_tensors(transfer, state, 10 * version + 1)
        del state["lm_head.weight"]
        once = publish_tensors(transfer, state, 10 * version + 2)
        for ref, way in ((both, "file"), (once, "in_place")):
            fake.read.clear()
            await engine.update_weights(ref, transfer)
            report = engine.last_update
            assert report is not None
            assert (report.version, report.way) == (ref.version, way)
            inode = (root / ref.key).stat().st_ino
            assert (fake.read[0] == inode) is (way == "in_place")
            assert not left_in(root / ".in-place")
    assert (await ask(engine, "r", [1])).versions[0].version == once.version
    await engine.stop()


async def test_a_refused_file_is_sent_as_tensors(fake: FakeSglang, transfer: Transfer) -> None:
    fake.faults.blind = True
    engine = await served(fake)
    await engine.update_weights(publish(transfer, make_model(0), 0), transfer)
    assert engine.last_update is not None
    assert engine.last_update.way == "values"
    await engine.stop()


def test_every_rank_reads_handles_and_none_frees_them() -> None:
    """One encoding gives back one reference, however many ranks read it."""
    tensors = [("w", torch.arange(1000.0))]
    data = payloads(tensors, 4, shared=True)
    code = (
        "import base64, pickle, sys\nimport torch\n"
        "torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "for text in sys.stdin.read().split():\n"
        "    ((name, tensor),) = pickle.loads(base64.b64decode(text))\n"
        "    assert name == 'w' and torch.equal(tensor, torch.arange(1000.0))\n"
        "    del tensor\n"
    )
    subprocess.run([sys.executable, "-c", code], input="\n".join(data), text=True, check=True)
    assert float(tensors[0][1][999]) == 999.0

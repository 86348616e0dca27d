"""Payloads in addition to token ids: in messages, prompts, stems, and the store's checks."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from services.experience_store.requests import check_payloads
from services.rollout.engines.errors import BadTurn
from services.rollout.engines.factory import engine_class_of
from tests.support.experience import make_sample, staged_row
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.training import make_spec
from tests.workflow.stage import make_chat
from troupe.contracts.payloads import (
    Payload,
    Payloads,
    PlacedPayload,
    add_payloads,
    from_protos,
    mark_of,
)
from troupe.prefixes import PrefixIndex, restore, share
from troupe.rpc import DataLoss, InvalidArgument
from troupe.tensors import from_proto, ids_to_proto
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.conversation import ConversationMemory
from troupe.workflow.errors import InvalidMessagesError
from troupe.workflow.languages import Language, role_of
from troupe.workflow.messages import PayloadReader, parse_messages
from troupe.workflow.token_ids import TokenIds

# SHA-256 of `make_sample("q0", 3, "t")` as it was sent and stored before there were payloads.
PLAIN = "d01913bc8c69c6d36da9a5b00f69b6aa4920cbb85f3cb4a37e166a9a97622b0e"
PICTURE = Payload("image", "image/png", b"picture")
KINDS = {"image": lambda payload: [5, 5, 5]}
URL = f"data:image/png;base64,{base64.b64encode(PICTURE.data).decode()}"
PART = {"type": "image_url", "image_url": {"url": URL}}


def no_ref(payload: Payload) -> str:
    raise AssertionError(f"{payload} fits into a row")


def not_loaded(key: str) -> np.ndarray[Any, Any]:
    raise KeyError(key)


# Messages and prompts.


@pytest.mark.parametrize("part", [PART, PICTURE])
def test_an_image_is_refused_by_an_agent_whose_engines_take_none(part: object) -> None:
    messages = [{"role": "user", "content": ["look", part]}]
    for reader in (None, PayloadReader({}), PayloadReader({"sound": lambda payload: [1]})):
        with pytest.raises(InvalidMessagesError) as caught:
            parse_messages(messages, None, reader)
        assert caught.value.field == "messages[0].content[1]"
        assert "agents cannot see images" in (caught.value.remedy or "")


@pytest.mark.parametrize("part", [PART, PICTURE])
def test_an_image_becomes_the_tokens_that_engines_declare(part: object) -> None:
    reader, chat = PayloadReader(KINDS), make_chat()
    messages = parse_messages([{"role": "user", "content": ["look", part, "!"]}], None, reader)
    prompt = ConversationMemory(chat).draft(messages, marks=reader.marks).prompt().ids
    (placed,) = prompt.payloads
    assert placed.payload == PICTURE
    assert prompt[placed.position : placed.position + placed.tokens] == (5, 5, 5)
    text = chat.transcript(prompt[: placed.position])
    assert text.endswith("look\n")
    assert chat.transcript(prompt[placed.position + 3 :]).startswith("\n!")


@pytest.mark.parametrize("url", ["https://example.org/a.png", "data:image/png;base64,%%", 3, None])
def test_an_image_that_is_not_sent_with_its_message_is_refused(url: object) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(InvalidMessagesError) as caught:
        parse_messages(messages, None, PayloadReader(KINDS))
    assert caught.value.field == "messages[0].content[0].image_url.url"


def test_a_mark_in_a_text_is_text_unless_the_payload_is_in_the_conversation() -> None:
    messages = parse_messages(mark_of(PICTURE), None, PayloadReader(KINDS))
    assert ConversationMemory(make_chat()).draft(messages, marks={}).prompt().ids.payloads == ()


def test_ids_with_payloads_keep_their_places_and_have_another_hash() -> None:
    plain, seen = TokenIds.of([1, 2]), TokenIds.of([5, 5, 5])
    seen.payloads = (PlacedPayload(PICTURE, 0, 3),)
    whole = TokenIds.joined((plain, seen, [7], seen))
    assert [placed.position for placed in whole.payloads] == [2, 6]
    bare = TokenIds.of(whole.array)
    assert bare.digest == xxhash.xxh3_64_intdigest(np.array(whole.array, "<i8").tobytes())
    assert bare.digest != whole.digest
    assert bare != whole


def test_an_agent_takes_what_the_engines_of_its_policy_take(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    assert engine_class_of("solver", spec.policies["solver"]).payload_kinds == {}
    languages = {"solver": Language(make_chat(), (), payload_kinds=KINDS)}
    assert role_of(spec, "solver", languages).payload_kinds is KINDS


async def test_an_engine_refuses_kinds_that_it_does_not_take(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    engine = ScriptedEngine(Script(list), "engine", "solver", spec.policies["solver"])
    prompt = TokenIds.of([5, 5, 5])
    prompt.payloads = (PlacedPayload(PICTURE, 0, 3),)
    with pytest.raises(BadTurn) as caught:
        await engine.generate("one", prompt, Sampling(), deadline_seconds=60)
    assert (caught.value.field, caught.value.value) == ("prompt_ids.payloads", "image")


# Samples.


def test_a_sample_without_payloads_has_the_same_bytes_as_ever() -> None:
    sample = make_sample("q0", 3, "t")
    sent = sample.SerializeToString()
    assert hashlib.sha256(sent).hexdigest() == PLAIN
    add_payloads(sample, (PlacedPayload(PICTURE, 0, 1),), no_ref)
    row = staged_row(sample)
    assert row.stored == sample.SerializeToString()[row.names :]
    del sample.payloads[:]
    assert sample.SerializeToString() == sent


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": ""}, "kind"),
        ({"digest": b"short"}, "digest"),
        ({"position": -1}, "position"),
        ({"position": 4}, "position"),
        ({"tokens": 0}, "position"),
        ({"tokens": 5}, "position"),
        ({"data": None}, ""),
    ],
)
def test_the_store_refuses_payloads_without_what_a_trainer_needs(
    changes: dict[str, Any], field: str
) -> None:
    given = {"kind": "image", "digest": PICTURE.digest, "tokens": 1, "data": b""}
    sample = make_sample("q0", 0, "t")  # a prompt of four tokens
    sample.payloads.add(**{name: one for name, one in (given | changes).items() if one is not None})
    with pytest.raises(InvalidArgument) as caught:
        check_payloads("payloads", sample)
    assert caught.value.field == f"payloads[0].{field}".rstrip(".")
    sample.payloads[0].CopyFrom(store_pb.Payload(**given))
    check_payloads("payloads", sample)


def test_other_bytes_than_were_appended_are_noticed() -> None:
    message = store_pb.Payload(kind="image", digest=PICTURE.digest, data=b"another", tokens=1)
    with pytest.raises(DataLoss, match="other bytes"):
        from_protos([message], not_loaded)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], Payloads, list[int]]]:
    """Turns as (prompt, payloads, response). They share beginnings, with payloads or with others in
    the same places."""
    turns: list[tuple[list[int], Payloads, list[int]]] = []
    for _ in range(draw(st.integers(1, 5))):
        prompt: list[int] = []
        payloads: Payloads = ()
        if turns and draw(st.booleans()):
            before, seen, reply = draw(st.sampled_from(turns))
            prompt, payloads = [*before, *reply], seen
        for size in draw(st.lists(st.sampled_from([1, 20, 40]), min_size=1, max_size=3)):
            if draw(st.booleans()):
                shown = Payload("image", "image/png", draw(st.sampled_from([b"a", b"b"])))
                payloads = (*payloads, PlacedPayload(shown, len(prompt), size))
                prompt = [*prompt, *[5] * size]
            else:
                prompt = [*prompt, *[6] * size]
        turns.append(([*prompt, 9], payloads, [7] * draw(st.sampled_from([1, 40]))))
    return turns


@given(conversations())
def test_whole_samples_come_back_with_their_payloads(
    turns: list[tuple[list[int], Payloads, list[int]]],
) -> None:
    index, sent = PrefixIndex(), []
    for turn, (prompt, payloads, response) in enumerate(turns):
        ids = np.array(prompt, np.int32)
        own = index.add("solver", turn, ids, np.array(response, np.int32), {}, payloads)
        sample = make_sample("q", turn, "t")
        sample.prompt_ids.CopyFrom(ids_to_proto(own.prompt))
        sample.response_ids.CopyFrom(ids_to_proto(np.array(response, np.int32)))
        if own.stem is not None:
            sample.stem.CopyFrom(own.stem)
        add_payloads(sample, own.payloads, no_ref)
        check_payloads("payloads", sample)
        sent.append(store_pb.ClaimedSample(sample=sample))
    whole = restore(sent)
    for items in (whole, restore(share(whole))):
        for item, (prompt, payloads, _) in zip(items, turns, strict=True):
            assert from_proto(item.sample.prompt_ids).tolist() == prompt
            assert from_protos(item.sample.payloads, not_loaded) == payloads

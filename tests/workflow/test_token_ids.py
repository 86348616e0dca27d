"""Token ids as arrays read, hash and join as the tuples that they took the place of."""

import gc
import random
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.stage import make_chat, make_tokenizer
from troupe.workflow import Agents, ChatTokenizer, Role, Sampling
from troupe.workflow.backend import GeneratedTurn
from troupe.workflow.messages import Reply
from troupe.workflow.token_ids import EMPTY, TokenIds

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)


@given(ids, st.slices(40))
def test_token_ids_read_like_a_tuple(given_ids: tuple[int, ...], part: slice) -> None:
    held = TokenIds.of(given_ids)
    assert tuple(held) == given_ids
    assert all(type(one) is int for one in held)
    assert held == given_ids
    assert given_ids == held
    assert hash(held) == hash(given_ids)
    assert held == list(given_ids)
    assert held != (*given_ids, 1)
    assert held[part] == given_ids[part]
    assert len(held) == len(given_ids)
    assert [held[i] for i in range(len(held))] == [*given_ids]
    assert bool(held) == bool(given_ids)
    assert all(one in held for one in given_ids)
    assert -1 not in held


@given(st.lists(ids, max_size=4))
def test_parts_are_joined_in_order(parts: list[tuple[int, ...]]) -> None:
    whole = TokenIds.joined(parts)
    assert whole == tuple(one for part in parts for one in part)
    if len(parts) > 1:
        assert TokenIds.of(parts[0]) + parts[1] == parts[0] + parts[1]
        assert parts[0] + TokenIds.of(parts[1]) == parts[0] + parts[1]


@given(
    st.lists(ids.filter(bool), min_size=1, max_size=4),
    st.sets(st.sampled_from(["digest", "json", "range"])),
)
def test_extended_ids_have_the_properties_of_the_same_ids_made_at_once(
    parts: list[tuple[int, ...]], known: set[str]
) -> None:
    grown = TokenIds.of(parts[0])
    for part in parts[1:]:
        # Some are asked of the shorter ids, others first of the longer ones.
        for name in known:
            getattr(grown, name)
        before, grown = grown, grown + part
        assert orjson.loads(before.json) == list(before)
    anew = TokenIds.of(tuple(grown))
    assert (grown.digest, grown.range) == (anew.digest, anew.range)
    assert orjson.loads(grown.json) == orjson.loads(anew.json) == list(anew)


@given(ids)
def test_the_digest_of_ids_that_seeds_derive_from_does_not_change(
    given_ids: tuple[int, ...],
) -> None:
    # Seeds of turns derive from it: the hash of the ids as eight bytes each, little-endian.
    packed = struct.pack(f"<{len(given_ids)}q", *given_ids)
    assert TokenIds.of(given_ids).digest == xxhash.xxh3_64_intdigest(packed)


def test_token_ids_are_read_only_and_not_copied() -> None:
    held = TokenIds.of([3, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        held.array[0] = 5
    assert TokenIds.of(held) is held
    assert held.range == (1, 3)
    assert np.array(held, np.int64).tolist() == [3, 1, 2]
    source = np.array([1, 2])
    copied = TokenIds.of(source)
    source[0] = 9
    assert copied == (1, 2)
    assert TokenIds.joined([]) is EMPTY


@pytest.mark.parametrize("beyond", [2**31, -(2**31) - 1, np.int64(2**31)])
def test_ids_beyond_int32_are_refused(beyond: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([1, beyond])
    with pytest.raises(OverflowError):
        TokenIds.of(np.array([1, beyond], np.int64))


def test_token_ids_that_are_not_integers_are_refused() -> None:
    with pytest.raises(TypeError):
        TokenIds.of(np.array([1.0]))
    wide: Any = [np.int64(4), True]
    assert TokenIds.of(wide) == (4, 1)


def test_a_reply_shows_its_prompt_as_a_tuple() -> None:
    prompt = TokenIds.of([5, 6])
    reply = Reply("solver", 0, "", prompt, (7,), (-0.5,), "stop")
    assert reply.prompt is prompt
    assert type(reply.prompt_ids) is tuple
    assert reply.prompt_ids == (5, 6)


async def test_a_conversation_keeps_few_bytes_of_each_token_drawn() -> None:
    """Ids and log-probs as objects take 68: gigabytes for 10,000 conversations of 32k tokens."""
    drawn = 4000

    class Backend:
        async def generate(
            self, agent: str, prompt_ids: Sequence[int], sampling: Sampling
        ) -> GeneratedTurn:
            ids = [4 + number % 60 for number in range(drawn)]
            return GeneratedTurn(ids, [-random.random() for _ in ids], (), "length")

    chat = make_chat()
    roles = {"solver": Role("solver", "one", chat, Sampling(max_new_tokens=drawn), None)}
    agents = Agents(roles, Backend(), seed=7)
    await agents["solver"].chat("warm")
    tracemalloc.start()
    try:
        kept = [await agents["solver"].chat("long") for _ in range(20)]
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / (len(kept) * drawn) < 24
    assert kept[0].token_ids[:2] == (4, 5)
    assert all(type(logprob) is float for logprob in kept[0].logprobs)


@settings(max_examples=60)
@given(st.text(max_size=60), st.booleans())
def test_the_tokenizer_behind_transformers_makes_the_same_ids(text: str, special: bool) -> None:
    slow = make_tokenizer(merges=[("a", "b"), ("ab", "c")])
    chat = ChatTokenizer(slow)
    text = text.encode("utf-8", "replace").decode()
    text = text + slow.all_special_tokens[0] + text if special else text
    made = slow.encode(text, add_special_tokens=False)
    assert chat.encode(text) == tuple(made)
    for skipped, shown in ((True, chat.text(made)), (False, chat.transcript(made))):
        assert shown == slow.decode(
            made, skip_special_tokens=skipped, clean_up_tokenization_spaces=False
        )

"""Long texts: tokenised outside the event loop, in the order of the calls, or refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from tests.workflow.stage import Script, make_chat
from troupe.workflow import Agents, ChatTokenizer, ContextOverflowError, Role, Sampling, TurnError
from troupe.workflow import conversation as module
from troupe.workflow.agent import Agent
from troupe.workflow.trying.tokenizer import ByteTokenizer

LONG = 100_000
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Gate(ByteTokenizer):
    """A tokenizer that reads long texts, or renders long conversations, only after `opened` is set,
    and counts tokenised texts."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`."""
        self.characters += len(text)
        if len(text) >= LONG:
            assert self.opened.wait(PATIENCE), "nothing else went on meanwhile"
        return super().encode(text, add_special_tokens)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        """The conversation as text."""
        if len(messages) > 1000:
            assert self.opened.wait(PATIENCE), "nothing else went on meanwhile"
        text = "".join(str(m["content"]) for m in messages)
        return text + ("tools" if options.get("tools") else "") + "<|assistant|>"


def says(agent: str, prompt: Any, sampling: Sampling) -> list[int]:
    return [70, 71]


def agents_of(tokenizer: Any, *, seed: int = 1, context: int = 0) -> Agents:
    """A trajectory with two agents."""
    chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)
    roles = {
        name: Role(name, name, chat, Sampling(max_new_tokens=8), context=context)
        for name in ("solver", "checker")
    }
    return Agents(roles, Script(says), seed=seed)


async def follow_up(agent: Agent) -> object:
    first = await agent.chat("hi")
    result = {"role": "tool", "content": "x" * LONG}
    return await agent.chat([{"role": "user", "content": "hi"}, first, result])


async def tools(agent: Agent) -> object:
    return await agent.chat("x" * LONG, tools=[TOOL])


LONG_CALLS: dict[str, Callable[[Agent], Coroutine[Any, Any, object]]] = {
    "chat": lambda agent: agent.chat("x" * LONG),
    "siblings": lambda agent: agent.chat("x" * LONG, n=3),
    "many short messages": lambda agent: agent.chat([{"role": "user", "content": "x"}] * 2000),
    "the result of a tool": follow_up,
    "with tools": tools,
    "a plain text": lambda agent: agent.complete(["x" * LONG, "y"], 1),
    "counting": lambda agent: agent.count_tokens(agent.read("x" * LONG)),
}


@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS.keys())
async def test_turns_of_others_go_on_while_a_long_text_is_tokenised(
    call: Callable[[Agent], Coroutine[Any, Any, object]],
) -> None:
    gate = Gate()
    chat = ChatTokenizer(gate)
    long = asyncio.ensure_future(call(agents_of(chat)["solver"]))
    for _ in range(3):
        others = [agents_of(chat, seed=n) for n in range(5)]
        replies = await asyncio.gather(
            *(one["solver"].chat(f"hi {n}") for n, one in enumerate(others))
        )
        assert len(replies) == 5
    assert not long.done()
    gate.opened.set()
    assert await asyncio.wait_for(long, PATIENCE)


def played(
    calls: list[tuple[str, int]], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What the turns of one trajectory are drawn with, whose calls are concurrent: agent, prompt,
    seed and place, in order."""
    monkeypatch.setattr(module, "_CHARACTERS_AT_ONCE", at_once)
    agents = agents_of(ByteTokenizer(), seed=5)

    async def branch(offset: int) -> None:
        some = calls[offset::2]
        await asyncio.gather(*[agents[name].chat("x" * size, n=2) for name, size in some])

    async def workflow() -> None:
        agents.enter()
        begun = [agents[name].chat("x" * size) for name, size in calls]
        await asyncio.gather(branch(0), branch(1), *begun)
        await agents["solver"].generate([7, 8])

    asyncio.run(workflow())
    return [
        (t.role.name, t.prompt_ids.digest, t.sampling.seed, t.place, t.number, t.reply is not None)
        for t in agents.close()
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["solver", "checker"]), st.sampled_from([1, 1, 2, 5000, 30_000])),
        min_size=1,
        max_size=6,
    )
)
def test_seeds_and_order_do_not_depend_on_how_prompts_are_tokenised(
    calls: list[tuple[str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        at_once = played(calls, 10**9, patched)
        assert played(calls, 0, patched) == at_once
        assert played(calls, 4000, patched) == at_once


async def test_a_call_behind_a_long_one_gets_the_seed_of_its_place() -> None:
    gate = Gate()
    text = "x" * LONG
    agents = agents_of(gate, seed=3)
    agents.enter()
    begun = [agents["solver"].chat(text), agents["solver"].chat("y"), agents["solver"].chat(text)]
    gate.opened.set()
    await asyncio.gather(*begun)
    seeds = [turn.sampling.seed for turn in agents.close()]

    again = agents_of(gate, seed=3)
    again.enter()
    for one in (text, "y", text):
        await again["solver"].chat(one)
    assert [turn.sampling.seed for turn in again.close()] == seeds
    assert len(set(seeds)) == 3


async def test_a_trajectory_that_ends_while_a_prompt_is_tokenised_has_no_such_turn() -> None:
    gate = Gate()
    agents = agents_of(gate)
    left = asyncio.ensure_future(agents["solver"].chat("x" * LONG))
    await asyncio.sleep(0)
    assert not agents.close()
    assert agents.unawaited == {"solver": 1}
    gate.opened.set()
    with pytest.raises(TurnError, match="the end of its trajectory"):
        await asyncio.wait_for(left, PATIENCE)


SPOKEN = {"role": "assistant", "content": "", "tool_calls": []}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    "call",
    [
        lambda agent: agent.complete(["x" * 9000, "y" * 9000], 1),
        lambda agent: agent.chat([{**SPOKEN, "tool_calls": [CALL] * 1000}]),
    ],
    ids=["several texts that are short alone", "many calls of tools"],
)
async def test_texts_that_are_long_only_in_sum_are_tokenised_in_a_thread(
    call: Callable[[Agent], Coroutine[Any, Any, object]],
) -> None:
    threads = set()

    class Noting(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            threads.add(threading.current_thread() if len(text) > 100 else None)
            return super().encode(text, add_special_tokens)

    await call(agents_of(Noting())["solver"])
    assert threading.main_thread() not in threads
    assert threads - {None}


@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS.keys())
async def test_a_text_far_beyond_the_context_is_refused_before_all_of_it_is_tokenised(
    call: Callable[[Agent], Coroutine[Any, Any, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 1000)
    gate = Gate()
    gate.opened.set()
    agents = agents_of(gate, context=200)
    with pytest.raises(ContextOverflowError, match="200 tokens"):
        await call(agents["solver"])
    assert gate.characters < 5000
    assert not any(turn.reply for turn in agents.close()[1:])


async def test_a_request_that_is_cancelled_at_once_leaves_no_turn_unawaited() -> None:
    for steps in range(1, 7):
        agents = agents_of(ByteTokenizer())
        request = asyncio.ensure_future(agents["solver"].complete(["a", "b"], 2))
        for _ in range(steps):
            await asyncio.sleep(0)
        if request.cancel():
            await asyncio.wait({request})
            assert not agents.turns
        assert not agents.close() or not request.cancelled()
        assert not agents.unawaited


async def test_more_ids_than_the_context_has_are_refused_unread() -> None:
    class Ids(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("they are too many to be read")

    with pytest.raises(ContextOverflowError):
        await agents_of(ByteTokenizer(), context=100)["solver"].generate(Ids([1] * 200))


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab \n", max_size=600),
    st.integers(1, 60),
    st.sampled_from([((("a", "b")),), (("a", "a"), ("aa", "aa"))]),
)
def test_no_text_that_fits_is_refused(
    text: str, context: int, merges: tuple[tuple[str, str], ...]
) -> None:
    chat = make_chat(merges=merges)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_SLICE", 64)
        patched.setattr(module, "_CHARACTERS_PER_TOKEN", 2)
        wanted = chat.encode(text)
        try:
            assert chat.encode_first(text, context) == wanted
        except module.TooManyTokensError:
            assert len(wanted) > context

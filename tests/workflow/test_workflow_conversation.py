"""Token ids end to end: the parts of a follow-up prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workflow.stage import CHARACTERS, CHATML, END, THINKING, make_chat
from troupe.workflow import ChatTemplateError, InvalidMessagesError
from troupe.workflow.conversation import ChatTokenizer, ConversationMemory
from troupe.workflow.messages import parse_messages
from troupe.workflow.trying.tokenizer import ByteTokenizer

USER = ("user", "what is 3+4?")


def test_a_first_prompt_is_the_rendered_conversation() -> None:
    chat = make_chat()
    ids = chat.first_ids((("system", "be brief"), USER))
    assert chat.transcript(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 3+4?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_follow_up_keeps_the_sampled_ids_although_tokenising_would_change_them() -> None:
    chat = make_chat(merges=[("a", "b")])
    memory = ConversationMemory(chat)
    prompt = memory.draft((USER,)).prompt().ids
    sampled = tuple(chat.encode("a") + chat.encode("b") + (2,))  # "ab" tokenises to one id
    assert len(chat.encode("ab")) == 1
    memory.remember((USER,), chat.text(sampled, stopped=True), (0,), prompt, sampled, stopped=True)
    follow_up = memory.draft((USER, ("assistant", "ab"), ("user", "sure?"))).prompt().ids
    assert follow_up[: len(prompt) + 3] == prompt + sampled
    assert chat.transcript(follow_up) == chat.transcript(
        chat.first_ids((USER, ("assistant", "ab"), ("user", "sure?")))
    )


def test_a_reply_cut_by_length_gets_the_end_of_turn_that_it_lacks() -> None:
    chat = make_chat()
    memory = ConversationMemory(chat)
    prompt = memory.draft((USER,)).prompt().ids
    cut = chat.encode("sev")
    memory.remember((USER,), "sev", (0,), prompt, cut, stopped=False)
    follow_up = memory.draft((USER, ("assistant", "sev"), ("user", "go on"))).prompt().ids
    text = chat.transcript(follow_up)
    assert text.startswith(chat.transcript(prompt) + "sev" + END + "\n<|im_start|>user\ngo on")


def test_thoughts_stay_in_the_ids_although_the_template_cuts_them_from_the_history() -> None:
    chat = make_chat(THINKING)
    memory = ConversationMemory(chat)
    prompt = memory.draft((USER,)).prompt().ids
    said = "<think>3 and 4</think>7"
    response = (*chat.encode(said), 2)
    memory.remember((USER,), said, (0,), prompt, response, stopped=True)
    follow_up = memory.draft((USER, ("assistant", said), ("user", "sure?"))).prompt().ids
    assert follow_up[: len(prompt + response)] == prompt + response
    assert chat.transcript(follow_up).endswith(
        f"7{END}\n<|im_start|>user\nsure?{END}\n<|im_start|>assistant\n"
    )


def test_the_earlier_of_two_equal_replies_is_continued() -> None:
    for order in ([0, 1], [1, 0]):
        chat = make_chat(merges=[("a", "b")])
        memory = ConversationMemory(chat)
        prompt = memory.draft((USER,)).prompt().ids
        responses = [(*chat.encode("a"), *chat.encode("b"), 2), (*chat.encode("ab"), 2)]
        for turn in order:
            memory.remember((USER,), "ab", (turn,), prompt, responses[turn], stopped=True)
        follow_up = memory.draft((USER, ("assistant", "ab"), USER)).prompt().ids
        assert follow_up[: len(prompt) + 3] == prompt + responses[0]


def test_an_edited_history_begins_a_new_conversation() -> None:
    chat = make_chat()
    memory = ConversationMemory(chat)
    prompt = memory.draft((USER,)).prompt().ids
    memory.remember((USER,), "7", (0,), prompt, (*chat.encode("7"), 2), stopped=True)
    edited = (USER, ("assistant", "8"), ("user", "sure?"))
    assert memory.draft(edited).prompt().ids == chat.first_ids(edited)


def test_trimmed_white_space_does_not_begin_a_new_conversation() -> None:
    chat = make_chat()
    memory = ConversationMemory(chat)
    prompt = memory.draft((USER,)).prompt().ids
    response = (*chat.encode(" 7\n"), 2)
    memory.remember((USER,), " 7\n", (0,), prompt, response, stopped=True)
    follow_up = memory.draft((USER, ("assistant", "7"), ("user", "sure?"))).prompt().ids
    assert follow_up[: len(prompt + response)] == prompt + response


text = st.text(alphabet=CHARACTERS, max_size=12)


@given(st.lists(st.tuples(text, text, st.booleans()), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_property_every_prompt_begins_with_all_that_went_before(
    exchanges: list[tuple[str, str, bool]],
) -> None:
    chat = make_chat()
    memory = ConversationMemory(chat)
    messages: tuple[tuple[str, str], ...] = ()
    before: tuple[int, ...] = ()
    for turn, (asked, said, ended) in enumerate(exchanges):
        messages = (*messages, ("user", asked))
        prompt = memory.draft(messages).prompt().ids
        assert prompt[: len(before)] == before
        # One token per character: ids and text determine each other.
        assert chat.transcript(prompt) == chat.transcript(chat.first_ids(messages))
        ended = ended or not said
        response = (*chat.encode(said), 2) if ended else chat.encode(said)
        memory.remember(messages, said, (turn,), prompt, response, stopped=ended)
        messages = (*messages, ("assistant", said))
        before = prompt + response


def test_the_cache_is_bounded() -> None:
    chat = make_chat()
    for number in range(3000):
        chat.first_ids((("user", f"{number} " + "x" * 300),))
    assert chat._cached_tokens <= 500_000
    assert sum(map(len, chat._cache.values())) == chat._cached_tokens


@pytest.mark.parametrize("template", [None, ""])
def test_a_tokenizer_without_template_says_what_to_do(template: str | None) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template") as caught:
        make_chat(template).first_ids((USER,))
    assert caught.value.field == "tokenizer.chat_template"
    assert caught.value.remedy


def test_a_template_that_raises_or_hides_replies_is_named() -> None:
    refuses = make_chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refuses.first_ids((USER,))
    hides = make_chat(CHATML.replace("{{ m.content }}", "{{ m.content | length }}"))
    for twice in (hides, make_chat(CHATML.replace("{{ m.content }}", "{{ m.content * 2 }}"))):
        with pytest.raises(ChatTemplateError, match="does not show an earlier reply"):
            twice.suffix_ids((USER, ("assistant", "7"), USER), 1, None)


def test_messages_with_the_placeholders_first_character_are_rendered_as_they_are() -> None:
    chat, odd = make_chat(), ("user", "\x02 \x02troupe \x02")
    suffix = chat.suffix_ids((odd, ("assistant", "7"), odd), 1, None)
    shown = chat.transcript(chat.encode(odd[1]))
    assert chat.transcript(suffix) == (
        f"<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    )


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "seven ", "8"]), max_size=6))
def test_a_transcript_differs_from_its_text_by_special_tokens(words: list[str]) -> None:
    chat = make_chat()
    ids = chat.encode("".join(words))
    assert chat.text_and_transcript(ids) == (chat.text(ids), chat.transcript(ids))
    assert chat.text(ids) == "".join(word for word in words if not word.startswith("<|"))


@pytest.mark.parametrize(
    "messages", [[], ["hello"], [{"role": "user"}], [{"role": "user", "content": 3}]]
)
def test_bad_messages_are_refused(messages: list[object]) -> None:
    with pytest.raises(InvalidMessagesError) as caught:
        parse_messages(messages, None)
    assert caught.value.field
    assert caught.value.field.startswith("messages")


def test_the_system_prompt_yields_to_the_conversations_own() -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert parse_messages(own, "default")[0] == ("system", "mine")
    assert parse_messages("hi", "default") == (("system", "default"), ("user", "hi"))


@given(st.text(max_size=30))
def test_texts_of_tokens_are_the_text_of_all(text: str) -> None:
    tokenizer = ChatTokenizer(ByteTokenizer())
    ids = tokenizer.encode(text)
    texts = tokenizer.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.transcript(ids)


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    tokenizer = ChatTokenizer(ByteTokenizer())
    assert tokenizer.texts(tokenizer.encode("a\u00e9")) == ["a", "", "\u00e9"]
    # A reply may end in the middle of one.
    assert tokenizer.texts(tokenizer.encode("\u20ac")[:2]) == ["", ""]


def test_the_prompts_of_a_conversation_take_memory_by_its_length_not_by_its_turns_squared() -> None:
    chat = make_chat()
    memory = ConversationMemory(chat)
    messages: tuple[tuple[str, str], ...] = (USER,)
    prompts, copies = [], []
    for turn in range(12):
        said = (*chat.encode(f"answer {turn} " * 20), 2)
        prompts.append(memory.draft(messages).prompt().ids)
        copies.append(tuple(prompts[-1]))
        text = chat.text(said, stopped=True)
        memory.remember(messages, text, (turn,), prompts[-1], said, stopped=True)
        # Only one of two conversations that diverge here continues.
        aside = memory.draft((*messages, ("assistant", text), ("user", "or not?"))).prompt().ids
        messages = (*messages, ("assistant", text), ("user", "go on"))
        assert aside[: len(prompts[-1])] == prompts[-1]
    assert [tuple(one) for one in prompts] == copies
    longest = prompts[-1].array
    assert all(np.shares_memory(one.array, longest) for one in prompts[1:])
    # The first one is other conversations', too.
    assert not np.shares_memory(prompts[0].array, longest)

"""Conversations are rendered as transformers' `apply_chat_template` renders them, byte by byte."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_team import TEMPLATE
from tests.workflow.stage import CHATML, make_tokenizer
from troupe.chat_templates.chat import ChatTemplates

# Like Qwen3: tools, thoughts of the last turns only, results of tools in one turn.
THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')
                .split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' ~ message.role ~ '\\n<think>\\n' ~ reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
# Like Llama 3.1: special tokens, a system turn that is extracted, indented JSON.
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- "\\n\\n" }}
{%- endfor %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
# The rest of the language: macros, calls, filters, tests, loops with conditions and breaks.
LANGUAGE = """
{%- macro shown(content, tag='p') -%}
    {%- if content is string -%}<{{ tag }}>{{ content }}</{{ tag }}>
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{{ item.text }}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- macro boxed(width=3) -%}[{{ caller()|indent(width) }}]{%- endmacro -%}
{%- set ns = namespace(seen=[], count=0) -%}
{%- for m in messages if m.role in ['user', 'assistant'] -%}
    {%- if loop.index > 3 %}{% break %}{% endif -%}
    {%- set ns.seen = ns.seen + [m.role] -%}
    {%- set ns.count = ns.count + m.content|length -%}
    {{- loop.cycle('a', 'b') ~ loop.revindex ~ (loop.nextitem or {}).get('role', '-') }}
    {%- if loop.changed(m.role) %}!{% endif -%}
    {%- generation -%}{{ shown(m.content, tag='q') }}{%- endgeneration -%}
{%- else -%}nobody{%- endfor -%}
{%- call boxed(2) %}{{ ns.seen|join(', ') }}
{{ ns.count }}{% endcall -%}
{%- set words %}{% for m in messages %}{{ m.content|capitalize }} {% endfor %}{% endset -%}
{{- words.strip().split(' ')|map('upper')|unique|sort|join('-') }}
{{- messages|map(attribute='role')|list|tojson }}
{{- messages|selectattr('role', 'equalto', 'tool')|list|length }}
{{- messages|rejectattr('tool_calls', 'defined')|map(attribute='content')|join('|') }}
{{- messages[0].content|replace('a', 'bb') }}
{{- {'b': 1, 'a': [1, 2.5, none, true]}|dictsort }}{{ {'x': {'y': 1}}|tojson(indent=2) }}
{%- for k, v in {'k': 1, 'l': [2]}.items() %}{{ k }}={{ v }};{% endfor -%}
{%- for k, v in {'k': 1}|items %}{{ k }}={{ v }};{% endfor -%}
{{- '%s is %05.1f' % ('pi', 3.14159) }}{{ '{} {a!r:>6}'.format(1, a='x') }}{{ '%d!'|format(3) }}
{{- 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ -3|abs }}{{ 3.7|int }}{{ '3'|float }}{{ 2.345|round(1) }}
{{- 'x' * 3 }}{{ [1] * 2 + [3] }}{{ (1, 2) }}{{ [3, 1]|max }}{{ [1, 2]|sum }}{{ 'a<b'|e }}
{{- 'x'|center(5) }}{{ 'ab'.ljust(4) }}{{ ['a', 'b', 'c']|batch(2, '-')|list }}{{ 'b' > 'a' }}
{{- 1 if messages[0].content == messages[-1].content else 0 }}{{ undefined_name|default('d') }}
{{- messages[0]['role'][0] }}{{ messages[0].content[1:3] }}{{ [1, 2, 3][::-1] }}{{ 'a' 'b' }}
{{- [1, 2]|first }}{{ [1, 2]|last }}{{ 'title case'|title }}{{ ' t '|trim }}{{ 5 is odd }}
{{- [1, 2, 3]|reverse|list }}{{ [1, 2, 3]|slice(2)|list }}{{ dict(a=1) }}{{ none }}{{ 1.0 }}
{{- joiner(', ')() }}{{ cycler('a', 'b').next() }}{{ 'a long text of words'|truncate(9) }}"""

TEMPLATES = {
    "chatml": CHATML,
    "tiny": TEMPLATE,
    "thinking": THINKING,
    "headers": HEADERS,
    "language": LANGUAGE,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "é": [1, None, 2.5]}},
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["x", None]}}}
TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["", "<think>\nso\n</think>\n\nyes", "</think>", "{{ 1 }}", "<tool_response>x</tool_response>"]
)
MESSAGE = st.one_of(
    st.builds(dict, role=st.sampled_from(["user", "system", "assistant"]), content=TEXT),
    st.builds(dict, role=st.just("assistant"), content=TEXT, reasoning_content=TEXT),
    st.builds(dict, role=st.just("assistant"), content=TEXT, thinking=TEXT),
    st.builds(dict, role=st.just("assistant"), content=TEXT, tool_calls=st.just([CALL])),
    st.builds(dict, role=st.just("tool"), content=TEXT, tool_call_id=st.just("a")),
    st.builds(dict, role=st.just("user"), content=TEXT, name=st.none()),
)
OPTIONS = st.sampled_from(
    [{}, {"enable_thinking": False}, {"date_string": "1 May", "bos_token": "B"}]
)


@cache
def prepared(template: str) -> tuple[Any, ChatTemplates]:
    """A tokenizer with the template, and the templates under test."""
    tokenizer = make_tokenizer(template)
    return tokenizer, ChatTemplates(tokenizer)


def outcome(render: Any, *args: Any, **kwargs: Any) -> Any:
    """The text, or the error that a template raises."""
    try:
        return render(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


def check(template: str, messages: list[Any], tools: Any, prompt: bool, options: Any) -> None:
    tokenizer, templates = prepared(template)
    wanted = outcome(
        tokenizer.apply_chat_template,
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=prompt,
        **options,
    )
    found = outcome(templates.render, messages, tools, add_generation_prompt=prompt, **options)
    assert found == wanted


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    tools=st.sampled_from([None, TOOLS]),
    prompt=st.booleans(),
    options=OPTIONS,
)
def test_a_conversation_is_rendered_as_transformers_renders_it(
    name: str, messages: list[Any], tools: Any, prompt: bool, options: Any
) -> None:
    check(TEMPLATES[name], messages, tools, prompt, options)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("smolvlm.processing_smolvlm", "DEFAULT_CHAT_TEMPLATE"),
        ("llama4.processing_llama4", "chat_template"),
        ("qwen2_audio.processing_qwen2_audio", "Qwen2AudioProcessor.default_chat_template"),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_that_transformers_ships_are_rendered_the_same(
    module: str, attribute: str, tools: Any
) -> None:
    found: Any = importlib.import_module(f"transformers.models.{module}")
    for name in attribute.split("."):
        found = getattr(found, name)
    text = found.fget(None) if isinstance(found, property) else found
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
        {"role": "user", "content": "And now?"},
    ]
    check(text, messages, tools, True, {})


def test_the_template_for_tools_is_taken_when_tools_are_offered() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools|length }} tools"}
    templates = ChatTemplates(tokenizer)
    assert templates.render([{"role": "user", "content": "x"}]) == "plain"
    assert templates.render([{"role": "user", "content": "x"}], TOOLS) == "1 tools"

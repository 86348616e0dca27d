"""The chat templates of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from troupe.chat_templates import TemplateLimitError

if TYPE_CHECKING:  # needs Jinja
    from troupe.chat_templates.bounded import BoundedTemplate

# Files of a model directory that may have its template, in the order in which they are looked for.
TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json")
TEMPLATE_REMEDY: Final = (
    "Use a template that does no more than show the conversation, such as the one that the model's "
    "makers publish."
)
_PROBE: Final = tuple(
    {"role": role, "content": f"This is what the {role} says."}
    for role in ("user", "assistant", "user")
)
_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def _probe(render: Callable[[list[dict[str, str]], Any], str]) -> None:
    for tools in (None, [_PROBE_TOOL]):
        for count in (1, len(_PROBE)):
            try:
                render([dict(one) for one in _PROBE[:count]], tools)
            except TemplateLimitError:
                raise
            except Exception:  # told when a conversation is refused; others may be taken
                continue


def directory_fault(directory: Path) -> tuple[str, str] | None:
    """The file of a model directory's chat template, and why it is refused; None if it is not.

    Needs no transformers. What cannot be read is told when the tokenizer is loaded.
    """
    file = directory / TEMPLATE_FILES[0]
    try:
        if file.is_file():
            text = file.read_text(encoding="utf-8")
        else:
            file = directory / TEMPLATE_FILES[1]
            text = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        from troupe.chat_templates.bounded import BoundedTemplate

        template = BoundedTemplate(str(text))
        _probe(
            lambda messages, tools: template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
            )
        )
    except TemplateLimitError as error:
        return str(file), str(error)
    except Exception:  # the file, its JSON, its syntax: told when the tokenizer is loaded
        return None
    return None


class ChatTemplates:
    """The chat templates of a tokenizer, compiled once each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[str, BoundedTemplate] = {}

    @property
    def source(self) -> str:
        """The file of the template, or the model's hub id."""
        found = str(getattr(self._tokenizer, "name_or_path", "") or "the tokenizer")
        files = (Path(found) / name for name in TEMPLATE_FILES)
        return next((str(file) for file in files if file.is_file()), found)

    def probe(self) -> None:
        """Render short conversations, also with a tool. Raises `TemplateLimitError`."""
        _probe(partial(self.render, add_generation_prompt=True))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        """The text that transformers' `apply_chat_template` makes of messages, which are JSON.

        Raises `TemplateLimitError`, and whatever else a template raises.
        """
        tokenizer = self._tokenizer
        made_by = type(tokenizer).apply_chat_template.__module__
        if made_by != "transformers.tokenization_utils_base":
            # Not a template: the tokenizer's own code.
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
            return text
        source = tokenizer.get_chat_template(None, tools)
        template = self._compiled.get(source)
        if template is None:
            # Jinja is there where transformers is, and this module elsewhere, too.
            from troupe.chat_templates.bounded import BoundedTemplate

            template = self._compiled[source] = BoundedTemplate(source)
        return template.render(
            **{
                **tokenizer.special_tokens_map,
                **options,
                "messages": [_as_transformers_shows(one) for one in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )


def _as_transformers_shows(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty fields, and with its thoughts by all names that templates read."""
    shown = {name: value for name, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((shown[name] for name in names if name in shown), None)
    if thoughts is None:
        return shown
    return {"thinking": thoughts, **shown, "reasoning_content": thoughts}

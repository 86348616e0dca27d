"""The chat templates of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from troupe.workflow.errors import TemplateLimitError

if TYPE_CHECKING:  # needs Jinja
    from troupe.workflow.templates.bounded import BoundedTemplate

log = structlog.get_logger(__name__)

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


class ChatTemplates:
    """The chat templates of a tokenizer, compiled once each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[str, BoundedTemplate] = {}

    @property
    def source(self) -> str:
        """The file of the template, or the model's hub id."""
        found = str(getattr(self._tokenizer, "name_or_path", "") or "the tokenizer")
        files = (Path(found) / name for name in ("chat_template.jinja", "tokenizer_config.json"))
        return next((str(file) for file in files if file.is_file()), found)

    def probe(self) -> None:
        """Render short conversations, also with a tool. Raises `TemplateLimitError`."""
        for tools in (None, [_PROBE_TOOL]):
            for count in (1, len(_PROBE)):
                try:
                    self.render(_PROBE[:count], tools, add_generation_prompt=True)
                except TemplateLimitError:
                    raise
                except Exception as error:  # the template takes other conversations, or none
                    log.info("a chat template refuses a short conversation", why=repr(error)[:300])

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
            from troupe.workflow.templates.bounded import BoundedTemplate

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

"""Compiles and renders one chat template within bounds."""

from __future__ import annotations

import threading
from typing import Any, Final

from jinja2 import Template, TemplateAssertionError, nodes

from troupe.chat_templates import TemplateLimitError
from troupe.chat_templates.metering import Counting, Meter
from troupe.chat_templates.sandbox import ChatEnvironment

# Bounds on a template's text; the longest of well-known models has 30,000 characters.
_TEMPLATE_CHARS: Final = 128 << 10
_TEMPLATE_NODES: Final = 10_000


class BoundedTemplate:
    """A compiled chat template that renders within bounds."""

    def __init__(self, text: str) -> None:
        """Compile. Raises `TemplateLimitError` for a template that is too large, and Jinja's errors
        for one that is none."""
        if len(text) > _TEMPLATE_CHARS:
            raise TemplateLimitError(
                f"it has {len(text)} characters, and {_TEMPLATE_CHARS} are the most"
            )
        self._meter = Meter()
        self._meter.start(0)
        # Renderings of two threads would count as one.
        self._lock = threading.Lock()
        environment = ChatEnvironment(self._meter)
        try:
            tree = environment.parse(text)
            count = sum(1 for _ in tree.find_all(nodes.Node))
            if count > _TEMPLATE_NODES:
                raise TemplateLimitError(f"it has {count} parts; {_TEMPLATE_NODES} are the most")
            Counting().template(tree)
            code = environment.compile(tree)
        except (RecursionError, MemoryError) as error:
            raise TemplateLimitError("it is nested too deeply") from error
        except TemplateAssertionError as error:
            raise TemplateLimitError(f"it uses what is not offered: {error}") from error
        self._template = Template.from_code(environment, code, environment.make_globals(None))

    def render(self, **variables: Any) -> str:
        """The text. Raises `TemplateLimitError`, and whatever else the template raises."""
        with self._lock:
            self._meter.start(_chars(variables))
            try:
                return self._template.render(**variables)
            except (RecursionError, MemoryError) as error:
                raise TemplateLimitError("it calls itself too often") from error


def _chars(value: Any) -> int:
    """Characters and items of a conversation, its tools and its options."""
    size, stack = 0, [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            size += 8 * len(one)
            stack += one.values()
        elif isinstance(one, list | tuple):
            size += 8 * len(one)
            stack += one
    return size

"""Structured logs: one JSON object (or readable line) per event, with the ids of its call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from typing import Any, Final

import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from opentelemetry import trace

from troupe.rpc.addresses import without_secrets
from troupe.rpc.channel import CONTEXT_IDS, context_key

# Bound ids appear in every log line of a call and of the tasks that it starts.
_ID_LENGTH: Final = 200


def configure(service: str, level: str, style: str) -> None:
    """Send all logging of this process, including libraries, to standard error.

    `style` is "json" or "console", `level` the lowest level shown.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        _add_trace,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    final: list[Any]
    if style == "json":
        final = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        final = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *final,
                _hide_secrets,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if root.level > logging.DEBUG:
        # An INFO line per request of an engine, which is one per turn and per poll.
        for name in ("httpx", "httpcore", "urllib3"):
            logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    structlog.contextvars.bind_contextvars(service=service)


def follow_stdlib() -> None:
    """Let `logging` decide level and output until `configure` is called.

    structlog's default would print every debug event of a server in a test or a notebook.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def bind_call(request: Any, metadata: Iterable[tuple[str, Any]]) -> None:
    """Bind the ids of this call's job, policy and trajectory to its log context.

    They are taken from the request's fields, or else from the call's metadata.
    """
    sent = dict(metadata)
    bound = {name: sent[key] for name in CONTEXT_IDS if (key := context_key(name)) in sent}
    if isinstance(request, Message):
        for name, path in _id_fields(request.DESCRIPTOR):
            value: Any = request
            for part in path:
                value = getattr(value, part)
            if value:
                bound[name] = value if len(value) <= _ID_LENGTH else f"{value[:_ID_LENGTH]}..."
    if bound:
        structlog.contextvars.bind_contextvars(**bound)


@lru_cache(maxsize=256)
def _id_fields(descriptor: Descriptor) -> list[tuple[str, tuple[str, ...]]]:
    """Return the paths of the context ids in a request type: top-level fields, or fields of a
    message."""
    found: dict[str, tuple[str, ...]] = {}
    for field in descriptor.fields:
        if field.name in CONTEXT_IDS and field.message_type is None:
            found[field.name] = (field.name,)
    for field in descriptor.fields:
        if field.message_type is None or field.is_repeated:
            continue
        for inner in field.message_type.fields:
            if inner.name in CONTEXT_IDS and inner.message_type is None:
                found.setdefault(inner.name, (field.name, inner.name))
    return list(found.items())


def _hide_secrets(logger: Any, method: str, rendered: Any) -> str:
    """Remove secrets from the rendered text. This is the last step, since tracebacks may also
    contain URLs."""
    return without_secrets(str(rendered))


def _add_trace(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


follow_stdlib()

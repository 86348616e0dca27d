"""OpenAI's and Anthropic's APIs over HTTP: routes, request bodies, streams, and clients that
disconnect.

Requests of the Responses and Messages APIs are translated to chat completion requests, so an agent
has only one entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from troupe.endpoint.anthropic_forms import AskedMessage, MessagesAnswer
from troupe.endpoint.errors import ApiError, FieldNames, of_workflow, unknown_address
from troupe.endpoint.openai_forms import (
    ApiAnswer,
    ChatAnswer,
    ChatRequest,
    CompletionRequest,
    TextAnswer,
    check_object,
)
from troupe.endpoint.responses_forms import AskedResponse, ResponseHistory, ResponsesAnswer
from troupe.http.bodies import BodyReader, BodyTooLarge, BodyTooSlow, ClientGone
from troupe.workflow.agent import Agent, ReadConversation
from troupe.workflow.backend import EndpointOptions
from troupe.workflow.conversation import ChatTokenizer
from troupe.workflow.errors import WorkflowError
from troupe.workflow.messages import Reply
from troupe.workflow.turns import TrajectoryRecord

log = structlog.get_logger(__name__)

Turns = Coroutine[Any, Any, list[Reply]]
Parsed = TypeVar("Parsed")
Written = TypeVar("Written")
Find = Callable[[str, str], tuple[Agent, EndpointOptions] | None]


# Larger bodies are read in a thread, and longer replies are serialized in one, to keep the event
# loop free.
_BYTES_READ_AT_ONCE: Final = 65_536
_CONTAINERS: Final = 100_000
# Fields of objects, and all values: the numbers of a long list cost least.
_FIELDS: Final = 200_000
_VALUES: Final = 2_000_000
# Also matches an unfinished string, so that a search never starts again inside one.
_JSON_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)', re.DOTALL)
_TOKENS_WRITTEN_AT_ONCE: Final = 8192
# Other APIs that OpenAI and others serve below a base URL.
_OTHER_APIS: Final = {
    "embeddings": "embeddings",
    "moderations": "moderations",
    "images": "images",
    "audio": "audio",
    "files": "files",
    "uploads": "uploads",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
    "assistants": "the Assistants API",
    "threads": "the Assistants API",
    "conversations": "the Conversations API",
    "vector_stores": "vector stores",
    "realtime": "the Realtime API",
    "rerank": "reranking",
    "tokenize": "tokenisation",
}
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_SERVED: Final = (
    "POST /chat/completions, POST /completions, POST /responses, POST /messages, "
    "POST /messages/count_tokens, GET /models, GET /models/{id}"
)
_PATHS: Final = (
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "models",
)


def create_app(
    find: Find, count: Callable[[str, int], None], *, max_body: int, keep_alive: float
) -> Starlette:
    """Return the application. `find(token, agent)` returns the addressed agent and its options;
    `count(call, status)` is called for every response; `max_body`: bytes; `keep_alive`: seconds
    between a stream's comments."""

    bodies = BodyReader(max_body)
    warnings = _SamplingWarnings()

    # Only of running trajectories: an agent lives as long as its trajectory.
    histories: WeakKeyDictionary[Agent, ResponseHistory] = WeakKeyDictionary()
    orders: WeakKeyDictionary[TrajectoryRecord, asyncio.Lock] = WeakKeyDictionary()

    async def read(request: Request, agent: Agent, parse: Callable[[Any], Parsed]) -> Parsed:
        """Return `parse(body)`, computed in a thread for a large body, and in the order in which
        the bodies of the trajectory arrived."""
        order = orders.setdefault(agent.trajectory, asyncio.Lock())
        received = bodies.read(request.scope["headers"], request.receive, agent.trajectory)
        return await _parsed(received, order, lambda body: parse(check_object(body)))

    def asks(
        agent: Agent, options: EndpointOptions, body: Any
    ) -> tuple[ChatRequest, ReadConversation]:
        """Return the chat completion request, and the conversation that it continues."""
        asked = ChatRequest.of(body, lenient=options.lenient)
        conversation = agent.read(
            asked.conversation(agent.role.system_prompt),
            tools=asked.tools,
            tool_choice="none" if asked.tool_choice == "none" else "auto",
            chat_template_kwargs=asked.template_options,
        )
        return asked, conversation

    def begin(
        agent: Agent, options: EndpointOptions, asked: ChatRequest, conversation: ReadConversation
    ) -> Turns:
        warnings.of_sampling(agent, options, asked)
        sampling = asked.sampling(agent, by_client=options.sampling == "client")
        return agent.reply_to(conversation, asked.n or 1, **sampling)

    async def chat(request: Request) -> Response:
        agent, options = _addressed(find, request)
        asked, conversation = await read(request, agent, partial(asks, agent, options))
        turns = begin(agent, options, asked, conversation)
        answer = ChatAnswer(
            asked.model or agent.name,
            agent.role.tokenizer,
            FieldNames(),
            asked.promises,
            logprobs=bool(asked.logprobs),
            token_ids=bool(asked.return_token_ids),
            with_usage=asked.wants_usage,
        )
        return await _answer(request, agent, asked, turns, answer, keep_alive)

    async def respond(request: Request) -> Response:
        agent, options = _addressed(find, request)
        history = histories.setdefault(agent, ResponseHistory())

        def parse(body: Any) -> tuple[AskedResponse, ChatRequest, ReadConversation]:
            given = AskedResponse.of(body, history)
            with given.names.applied():
                return given, *asks(agent, options, given.chat)

        given, asked, conversation = await read(request, agent, parse)
        with given.names.applied():
            turns = begin(agent, options, asked, conversation)
            own = agent.role.sampling
            drawing = {"temperature": own.temperature, "top_p": own.top_p}
            if options.sampling == "client":
                drawing |= asked.other_drawing(agent)
            name = asked.model or agent.name
            answer = ResponsesAnswer(
                name, agent.role.tokenizer, given.names, given, asked, history, drawing
            )
            return await _answer(request, agent, asked, turns, answer, keep_alive)

    async def asked_message(
        request: Request, agent: Agent, options: EndpointOptions
    ) -> tuple[AskedMessage, ChatRequest, ReadConversation]:
        def parse(body: Any) -> tuple[AskedMessage, ChatRequest, ReadConversation]:
            given = AskedMessage.of(body, agent.role.sampling.max_new_tokens)
            with given.names.applied():
                return given, *asks(agent, options, given.chat)

        return await read(request, agent, parse)

    async def message(request: Request) -> Response:
        agent, options = _addressed(find, request)
        given, asked, conversation = await asked_message(request, agent, options)
        with given.names.applied():
            turns = begin(agent, options, asked, conversation)
            name = asked.model or agent.name
            answer = MessagesAnswer(name, agent.role.tokenizer, given.names, asked)
            return await _answer(request, agent, asked, turns, answer, keep_alive)

    async def count_tokens(request: Request) -> Response:
        agent, options = _addressed(find, request)
        given, _, conversation = await asked_message(request, agent, options)
        with given.names.applied():
            tokens = await agent.count_tokens(conversation)
        return JSONResponse({"input_tokens": tokens})

    async def complete(request: Request) -> Response:
        agent, options = _addressed(find, request)
        parse = partial(CompletionRequest.of, lenient=options.lenient)
        asked = await read(request, agent, parse)
        warnings.of_sampling(agent, options, asked)
        sampling = asked.sampling(agent, by_client=options.sampling == "client")
        turns = agent.complete(
            asked.prompts,
            asked.n or 1,
            add_special_tokens=asked.add_special_tokens is not False,
            **sampling,
        )
        answer = TextAnswer(
            asked.model or agent.name,
            agent.role.tokenizer,
            FieldNames(),
            logprobs=asked.logprobs is not None,
            token_ids=bool(asked.return_token_ids),
            with_usage=asked.wants_usage,
        )
        return await _answer(request, agent, asked, turns, answer, keep_alive)

    async def models(request: Request) -> Response:
        agent, _ = _addressed(find, request)
        data, ends = [_model(agent.name)], {"first_id": agent.name, "last_id": agent.name}
        return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})

    async def model(request: Request) -> Response:
        _addressed(find, request)
        return JSONResponse(_model(request.path_params["id"]))

    async def elsewhere(request: Request) -> Response:
        error = _not_served(request.method, request.path_params["path"])
        if error.status != 405:  # a 405 reveals nothing about the address
            _addressed(find, request)
        raise error

    def route(
        path: str, call: Callable[[Request], Awaitable[Response]], *methods: str, name: str = ""
    ) -> Route:
        async def answered(request: Request) -> Response:
            response = await _guarded(call, request)
            count(name or path.strip("/"), response.status_code)
            return response

        return Route(f"/t/{{token}}/{{agent}}{path}", answered, methods=[*methods])

    routes = [
        route("/v1/chat/completions", chat, "POST", name="chat/completions"),
        route("/v1/completions", complete, "POST", name="completions"),
        route("/v1/responses", respond, "POST", name="responses"),
        route("/v1/messages", message, "POST", name="messages"),
        route("/v1/messages/count_tokens", count_tokens, "POST", name="messages/count_tokens"),
        route("/v1/models", models, "GET", name="models"),
        route("/v1/models/{id:path}", model, "GET", name="models"),
        route("/{path:path}", elsewhere, *_METHODS, name="other"),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


class _SamplingWarnings:
    """A log of the clients' sampling parameters that are not followed; each is reported once."""

    def __init__(self) -> None:
        self._logged: WeakKeyDictionary[ChatTokenizer, set[tuple[str, str]]] = WeakKeyDictionary()

    def of_sampling(
        self, agent: Agent, options: EndpointOptions, asked: ChatRequest | CompletionRequest
    ) -> None:
        """Log parameters of a request that differ from those that the agent is trained with."""
        if options.sampling == "client":
            return
        role = agent.role
        logged = self._logged.setdefault(role.tokenizer, set())
        for name, value in asked.other_drawing(agent).items():
            if (role.name, name) not in logged:
                logged.add((role.name, name))
                log.warning(
                    "a client's sampling is not followed",
                    agent=role.name,
                    field=name,
                    client=value,
                    job=getattr(role.sampling, name),
                    remedy='Set it in the job, or open the endpoint with sampling="client".',
                )


def _model(name: str) -> dict[str, Any]:
    """Return a model in the form that the clients of both OpenAI and Anthropic read."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "troupe"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _not_served(method: str, path: str) -> ApiError:
    """Return the error for an API that is not served, or for a served one with a wrong path or
    method."""
    parts = [part for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        parts.pop(0)
    short = "/".join(parts)[:80]
    if short in _PATHS or parts[:1] == ["models"]:
        asked = f"{method} .../{path[:80]} is not a known path or method"
        code, status = ("method_not_allowed", 405) if path == f"v1/{short}" else ("not_found", 404)
    else:
        name = _OTHER_APIS.get(parts[0] if parts else "")
        about = f" ({name})" if name else ""
        asked = f"{method} /{short}{about} is not served"
        code, status = "unknown_route", 404
    doubled = " Anthropic's clients add /v1 themselves: give them `endpoint.anthropic_url`."
    remedy = doubled if path.startswith("v1/v1/messages") else ""
    return ApiError(
        status,
        f"{asked}. A base URL that ends in /v1 serves {_SERVED}.{remedy} See docs/openai.md.",
        code=code,
    )


def _of_anthropic(request: Request) -> bool:
    """Return whether the client expects errors in the form of Anthropic's API."""
    path = request.scope["path"].rstrip("/")
    return "anthropic-version" in request.headers or path.endswith(
        ("/v1/messages", "/v1/messages/count_tokens")
    )


async def _guarded(call: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    anthropic = _of_anthropic(request)
    try:
        return await call(request)
    except ApiError as error:
        return error.response(anthropic=anthropic)
    except WorkflowError as error:
        return of_workflow(error).response(anthropic=anthropic)
    except ClientDisconnect:
        return Response(status_code=499)  # the client has disconnected
    except Exception:
        # Without the path, which contains the secret address and the client's text.
        log.exception("the endpoint failed", call=call.__name__)
        return _internal().response(anthropic=anthropic)


def _addressed(find: Find, request: Request) -> tuple[Agent, EndpointOptions]:
    found = find(request.path_params["token"], request.path_params["agent"])
    if found is None:
        raise unknown_address()
    return found


def _of_json(body: bytes | bytearray) -> Any:
    """Parse a body as JSON. Raises `ApiError`."""
    _check_size(body)
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # perhaps half a surrogate pair, which tokenizers reject
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}.", code="invalid_json") from None
    return value


def _check_size(body: bytes | bytearray) -> None:
    """Raise `ApiError` for a body with too many values: the JSON parser holds the GIL, so each
    object costs microseconds in which no other thread runs, and each number a tenth of one."""
    if not _too_many(body):
        return
    found = _too_many(_JSON_STRING.sub(b"", body))  # texts may contain any number of signs
    if found:
        count, what, most = found
        raise ApiError(
            413,
            f"the body has {count} {what}. Send {most} at most: a shorter conversation, or fewer "
            "tools.",
            code="request_too_large",
        )


def _too_many(body: bytes | bytearray) -> tuple[int, str, int] | None:
    """Return the number, name and limit of what a body without strings has too much of."""
    counts = (
        (body.count(b"{") + body.count(b"["), "objects and lists", _CONTAINERS),
        (body.count(b":"), "fields", _FIELDS),
        (body.count(b","), "values", _VALUES),
    )
    return next((one for one in counts if one[0] > one[2]), None)


async def _parsed(
    received: AbstractAsyncContextManager[bytearray],
    order: asyncio.Lock,
    parse: Callable[[Any], Parsed],
) -> Parsed:
    """Return `parse(value)` for the JSON value of a body. Bodies that share an `order` are parsed
    in the order of their arrival."""
    try:
        async with received as body, order:
            if len(body) <= _BYTES_READ_AT_ONCE:
                return parse(_of_json(body))
            return await asyncio.to_thread(lambda: parse(_of_json(body)))
    except BodyTooSlow as error:
        raise ApiError(408, f"{error}.", code="request_timeout") from None
    except BodyTooLarge as error:
        raise ApiError(
            413,
            f"{error}. Shorten the conversation, or raise TROUPE_ENDPOINT_BODY_MIB of the rollout "
            "service.",
            code="request_too_large",
        ) from None
    except ClientGone:
        raise ClientDisconnect from None


async def _answer(
    request: Request,
    agent: Agent,
    asked: ChatRequest | CompletionRequest,
    turns: Turns,
    answer: ApiAnswer,
    keep_alive: float,
) -> Response:
    """Return the response, or a stream. If the client has left when the answer is sent, the turns
    are cancelled or withdrawn."""
    turns = _noted(turns, request.headers.get("x-session-id", ""))
    pending = _Pending(request, agent, turns)
    streams = bool(asked.stream)
    handed_over = False
    try:
        ended = await pending.wait(keep_alive if streams else None)
        if ended:
            replies = pending.replies()
            if not streams:
                response = JSONResponse(await _written(answer.whole, replies))
                pending.deliver()
                return response
        handed_over = True
        return StreamingResponse(
            _stream(pending, answer, keep_alive),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
    finally:
        if not handed_over:
            pending.close()


async def _noted(turns: Turns, session: str) -> list[Reply]:
    """Return the replies, labelled with the client's name for their conversation."""
    replies = await turns
    for reply in replies:
        reply.session = session
    return replies


async def _stream(pending: _Pending, answer: ApiAnswer, keep_alive: float) -> AsyncIterator[str]:
    """Yield server-sent events. Comments keep the connection open until the turns are complete."""
    try:
        # One interval passed before the stream began.
        while not await pending.wait(0):
            yield ": the turn is being generated\n\n"
            await pending.wait(keep_alive)
        with answer.names.applied():
            replies = pending.replies()
        *parts, last = await _written(lambda replies: list(answer.chunks(replies)), replies)
        for part in parts:
            yield part
        pending.deliver()
        yield last
    except ClientDisconnect:
        return
    except ApiError as error:
        yield answer.failure(error)
    except Exception:
        log.exception("the endpoint failed in a stream")
        yield answer.failure(_internal())
    finally:
        pending.close()


async def _written(write: Callable[[list[Reply]], Written], replies: list[Reply]) -> Written:
    """Return `write(replies)`, computed in a thread for long replies."""
    if sum(len(reply.response) for reply in replies) <= _TOKENS_WRITTEN_AT_ONCE:
        return write(replies)
    return await asyncio.to_thread(write, replies)


class _Pending:
    """Turns that are generated for a client that may disconnect."""

    def __init__(self, request: Request, agent: Agent, turns: Turns) -> None:
        self._agent = agent
        self._turns = asyncio.ensure_future(turns)
        self._disconnected = asyncio.ensure_future(_disconnected(request))
        self._delivered = False

    async def wait(self, seconds: float | None) -> bool:
        """Wait up to `seconds`, and return whether the turns have ended. They have their own
        deadline.

        Raises `ClientDisconnect`.
        """
        both = {self._turns, self._disconnected}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._turns.done() and self._disconnected.done():
            raise ClientDisconnect
        return self._turns.done()

    def replies(self) -> list[Reply]:
        """Return the replies. Raises `WorkflowError`, and `ApiError` if the trajectory has ended
        meanwhile."""
        if self._turns.cancelled():
            raise unknown_address()
        return self._turns.result()

    def deliver(self) -> None:
        """Record that the end of the answer is sent now. Raises `ClientDisconnect` if the client
        has already closed the connection."""
        if self._disconnected.done():
            raise ClientDisconnect
        self._delivered = True

    def close(self) -> None:
        """Cancel the remaining turns, and withdraw undelivered replies. Repeatable."""
        self._disconnected.cancel()
        self._turns.cancel()
        # Also when they end despite the cancellation.
        self._turns.add_done_callback(self._ended)

    def _ended(self, turns: asyncio.Future[list[Reply]]) -> None:
        # Asking for the exception marks it as retrieved.
        if not turns.cancelled() and turns.exception() is None and not self._delivered:
            self._agent.withdraw(turns.result())


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    error_here = unknown_address()
    if status == 405:
        message = f"this path does not accept {request.method}. See docs/openai.md."
        error_here = ApiError(status, message, code="method_not_allowed")
    return error_here.response(anthropic=_of_anthropic(request))


def _internal() -> ApiError:
    return ApiError(
        500,
        "Troupe itself failed; see the rollout worker's log.",
        code="internal",
        type="server_error",
    )

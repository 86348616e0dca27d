"""The HTTP side: routes, bodies, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from troupe.bodies import BodyReader, BodyTooLarge, BodyTooSlow, ClientGone
from troupe.endpoint.errors import ApiError, no_such_place, of_workflow
from troupe.endpoint.replies import ChatAnswer, TextAnswer, event
from troupe.endpoint.requests import ChatRequest, CompletionRequest, check_object
from troupe.workflow import Agent, Reply, WorkflowError

log = structlog.get_logger(__name__)

Turns = Coroutine[Any, Any, list[Reply]]
Answer = ChatAnswer | TextAnswer


class Door(Protocol):
    """One agent of one running trajectory."""

    @property
    def agent(self) -> Agent: ...

    @property
    def lenient(self) -> bool: ...


def create_app(
    find: Callable[[str, str], Door | None],
    count: Callable[[str, int], None],
    *,
    max_body: int,
    keep_alive: float,
) -> Starlette:
    """The application. `find(token, agent)` knows who is served; `count(call, status)` is told of
    every answer; `max_body` is in bytes, `keep_alive` in seconds between a stream's comments."""

    bodies = BodyReader(max_body)

    async def body(request: Request) -> Any:
        return check_object(await _read_json(request, bodies))

    async def chat(request: Request) -> Response:
        door = _door(find, request)
        asked = ChatRequest.of(await body(request), lenient=door.lenient)
        turns = door.agent.chat(
            asked.conversation, n=asked.n or 1, tools=asked.tools, **asked.sampling
        )
        answer = ChatAnswer(
            asked.model or door.agent.name,
            door.agent.role.tokenizer,
            calls=asked.tool_choice != "none",
            logprobs=bool(asked.logprobs),
            token_ids=bool(asked.return_token_ids),
        )
        return await _answer(request, asked, turns, answer, keep_alive)

    async def complete(request: Request) -> Response:
        door = _door(find, request)
        asked = CompletionRequest.of(await body(request), lenient=door.lenient)
        tokenizer = door.agent.role.tokenizer
        prompt = asked.prompt
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        turns = door.agent.generate(ids, n=asked.n or 1, **asked.sampling)
        answer = TextAnswer(
            asked.model or door.agent.name,
            tokenizer,
            logprobs=asked.logprobs is not None,
            token_ids=bool(asked.return_token_ids),
        )
        return await _answer(request, asked, turns, answer, keep_alive)

    async def models(request: Request) -> Response:
        name = _door(find, request).agent.name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "troupe"}
        return JSONResponse({"object": "list", "data": [model]})

    def route(path: str, call: Callable[[Request], Awaitable[Response]], method: str) -> Route:
        async def answered(request: Request) -> Response:
            response = await _guarded(call, request)
            count(path, response.status_code)
            return response

        return Route(f"/t/{{token}}/{{agent}}/v1/{path}", answered, methods=[method])

    routes = [
        route("chat/completions", chat, "POST"),
        route("completions", complete, "POST"),
        route("models", models, "GET"),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _guarded(call: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await call(request)
    except ApiError as error:
        return error.response()
    except WorkflowError as error:
        return of_workflow(error).response()
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception:
        log.exception("the endpoint failed", path=request.url.path.rpartition("/v1/")[2])
        return _internal().response()


def _door(find: Callable[[str, str], Door | None], request: Request) -> Door:
    door = find(request.path_params["token"], request.path_params["agent"])
    if door is None:
        raise no_such_place()
    return door


async def _read_json(request: Request, bodies: BodyReader) -> Any:
    try:
        async with bodies.read(request.scope["headers"], request.receive) as read:
            value = json.loads(read)
            if b"\\ud" in read.lower():  # half a character, perhaps, which no tokenizer takes
                json.dumps(value, ensure_ascii=False).encode()
            return value
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
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}.", code="invalid_json") from None


async def _answer(
    request: Request,
    asked: ChatRequest | CompletionRequest,
    turns: Turns,
    answer: Answer,
    keep_alive: float,
) -> Response:
    """The replies, or a stream of them; a client that goes away takes its turns with it."""
    pending = _Pending(request, turns)
    streams = bool(asked.stream)
    handed_over = False
    try:
        ended = await pending.wait(keep_alive if streams else None)
        if ended:
            replies = pending.replies()
            if not streams:
                return JSONResponse(answer.whole(replies))
        handed_over = True
        return StreamingResponse(
            _stream(pending, answer, keep_alive, with_usage=asked.wants_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
    finally:
        if not handed_over:
            pending.close()


async def _stream(
    pending: _Pending, answer: Answer, keep_alive: float, *, with_usage: bool
) -> AsyncIterator[str]:
    """Engines answer with whole responses: until then comments keep the connection open."""
    try:
        while not await pending.wait(keep_alive):
            yield ": the turn is being generated\n\n"
        for chunk in answer.chunks(pending.replies(), with_usage=with_usage):
            yield chunk
    except ClientDisconnect:
        return
    except ApiError as error:
        yield event(error.body)
    except WorkflowError as error:
        yield event(of_workflow(error).body)
    except Exception:
        log.exception("the endpoint failed in a stream")
        yield event(_internal().body)
    finally:
        pending.close()


class _Pending:
    """Turns that are being generated for a client that may go away."""

    def __init__(self, request: Request, turns: Turns) -> None:
        self._turns = asyncio.ensure_future(turns)
        self._gone = asyncio.ensure_future(_gone(request))

    async def wait(self, seconds: float | None) -> bool:
        """Whether the turns have ended, after at most `seconds`. Their own deadline bounds them.

        Raises `ClientDisconnect`.
        """
        both = {self._turns, self._gone}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._turns.done() and self._gone.done():
            raise ClientDisconnect
        return self._turns.done()

    def replies(self) -> list[Reply]:
        """What came. Raises `WorkflowError`, and `ApiError` when the trajectory ended meanwhile."""
        if self._turns.cancelled():
            raise no_such_place()
        return self._turns.result()

    def close(self) -> None:
        """Abort what is left. Repeatable."""
        self._gone.cancel()
        if not self._turns.done():
            self._turns.cancel()
        # An error that nobody waits for any more.
        self._turns.add_done_callback(lambda t: t.cancelled() or t.exception())


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405:
        message = f"{request.method} is not for this path. See docs/openai.md."
        return ApiError(status, message, code="method_not_allowed").response()
    return no_such_place().response()


def _internal() -> ApiError:
    return ApiError(
        500,
        "Troupe itself failed; the rollout worker's log says how.",
        code="internal",
        type="server_error",
    )

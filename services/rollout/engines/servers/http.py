"""`HttpServer`: the connections of an inference server that speaks JSON over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson

from services.rollout.engines.errors import BrokenReply, Refused, ServerGone
from services.rollout.engines.servers.interface import InferenceServer

# A server that is alive accepts within milliseconds; one that loads weights may take a minute.
CONNECT_SECONDS: Final = 5.0
CONTROL_SECONDS: Final = 60.0
# Shorter than the five seconds after which servers close idle connections: one that they are
# closing would cost a turn.
_IDLE_SECONDS: Final = 3.0
# Weights that come from a slow disk, or that are hashed while turns run.
_SLOWEST_BYTES_PER_SECOND: Final = 50e6

_JSON: Final = {"content-type": "application/json"}

Json = dict[str, Any]


def seconds_for(num_bytes: int) -> float:
    """How long a server may take to read so many bytes of weights."""
    return CONTROL_SECONDS + num_bytes / _SLOWEST_BYTES_PER_SECOND


class HttpServer(InferenceServer):
    """An inference server over HTTP. Requests raise `ServerGone`, `BrokenReply` or `Refused`."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    async def close(self) -> None:
        """Drop all connections."""
        self._closed = True
        for session in self._sessions.values():
            await session.close()

    async def _json(self, method: str, path: str, body: Json | None = None, **kwargs: Any) -> Json:
        """The JSON object that a request is answered with; a list is returned under `loads`."""
        content = await self._send(method, path, body, **kwargs)
        try:
            reply = orjson.loads(content)
        except ValueError as error:
            raise BrokenReply(f"{path} of {self.url} did not answer JSON") from error
        if isinstance(reply, list):  # `/get_load` of SGLang's older releases
            return {"loads": reply}
        if not isinstance(reply, dict):
            raise BrokenReply(f"{path} of {self.url} answered no JSON object")
        return reply

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        params: Mapping[str, str] | None = None,
        seconds: float | None = CONTROL_SECONDS,
        reuse: bool = False,
    ) -> bytes:
        """The content of a request's answer. `reuse`: over a connection of earlier such requests,
        for turns, which are repeated if it breaks.

        All others get a connection of their own: servers close the one over which they have
        answered with a fault of theirs, and the next request would be lost, which ends an update.
        """
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session(reuse).request(
                method,
                self.url + path,
                data=data,
                params=params,
                headers=_JSON if data is not None else None,
                timeout=aiohttp.ClientTimeout(seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerGone(f"{path} of {self.url}: {error!r}") from error
        except RuntimeError as error:  # the connections were closed meanwhile
            raise ServerGone(f"{path} of {self.url}: {error}") from error
        if response.ok:
            return content
        raise Refused(path, response.status, _message(content))

    def _session(self, reuse: bool) -> aiohttp.ClientSession:
        """The connections. They belong to the event loop of the first call."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if reuse not in self._sessions:
            keep = {"keepalive_timeout": _IDLE_SECONDS} if reuse else {"force_close": True}
            self._sessions[reuse] = aiohttp.ClientSession(
                # The engine limits turns in flight; a second limit would only hide the queue.
                connector=aiohttp.TCPConnector(limit=0, **keep),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No proxy of the environment: engines are on this network.
                trust_env=False,
            )
        return self._sessions[reuse]


def _message(content: bytes) -> str:
    """The error message of a reply; servers put it in different places."""
    try:
        reply = orjson.loads(content)
    except ValueError:
        return content.decode(errors="replace")[:500]
    if isinstance(reply, dict):
        error = reply.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        found = (reply.get(key) for key in ("message", "error_message", "detail"))
        return str(inner or next(filter(None, found), reply))[:500]
    return str(reply)[:500]

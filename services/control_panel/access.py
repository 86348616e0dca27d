"""Access checks of the panel: `Host`, `Origin`, the content type, and the cluster's token.

A job is code that the cluster runs, so pages of other websites in a browser on the same machine
must not reach the panel. Three independent checks:

- `Host` must be loopback, the address of the connection, or configured (`TROUPE_PANEL_HOSTS`):
  another site's name that resolves to this machine (DNS rebinding) is refused.
- `Origin` and `Sec-Fetch-Site`, which browsers send and pages cannot change, must name the panel's
  own page. Other programs send neither.
- Bodies have a type that no HTML form and no simple cross-origin request can send.

If the cluster has a token, everything below /api requires it: as a bearer token from programs, as
a session cookie from browsers. The token opens a session, and so does a link that works once
(`troupe up` prints it).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, SecretStr
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.chassis.settings import ServiceSettings
from services.control_panel import calls, views
from troupe.rpc.addresses import authority_host, is_loopback_host, is_wildcard_host
from troupe.rpc.authentication import HEADER, ClusterToken
from troupe.rpc.tokens import LinkCodes

SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
YAML_TYPES: Final = (
    "application/yaml",
    "application/x-yaml",
    "text/yaml",
    "text/x-yaml",
)
JSON_TYPE: Final = "application/json"

_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PanelSettings(ServiceSettings):
    """Settings of the control panel."""

    panel_hosts: str = ""
    """Host names, in addition to loopback, at which browsers reach the panel; comma-separated."""

    @property
    def host_names(self) -> frozenset[str]:
        """The values of `Host`, in addition to loopback, that are names of this panel."""
        given = [one for one in self.panel_hosts.split(",") if one.strip()]
        if not is_wildcard_host(self.host):
            given.append(self.host)
        if self.advertise_address:
            given.append(self.advertise_address)
        return frozenset(filter(None, map(host_name, given)))


class Panel(FastAPI):
    """The FastAPI application of the panel, behind the access checks."""

    def __init__(self, *, hosts: Iterable[str], token: str | None, **options: Any) -> None:
        """Accept `hosts` as names of the panel in addition to loopback. `options` are FastAPI's."""
        super().__init__(**options)
        self._hosts = frozenset(hosts)
        self.state.token = None if token is None else PanelToken(SecretStr(token))

    def build_middleware_stack(self) -> ASGIApp:
        """Wrap all layers in the access checks, so that error answers also have their headers."""
        return AccessGuard(super().build_middleware_stack(), self._hosts, self.state.token)


class PanelToken(ClusterToken):
    """The cluster's token, and the browser sessions that it has opened."""

    def __init__(self, token: SecretStr) -> None:
        super().__init__(token)
        self.codes = LinkCodes(token)

    def admits_request(self, request: Request) -> bool:
        """Return whether the request has the token, or a session."""
        if self.admits(request.headers.get(HEADER, "")):
            return True
        return self.codes.is_session(request.cookies.get(_cookie_name(request), ""))


class AccessGuard:
    """ASGI middleware that refuses requests of other sites, and of callers without the token."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: PanelToken | None) -> None:
        """Accept `hosts` as names of the panel in addition to loopback, and callers with `token`
        (None: all callers)."""
        self._app = app
        self._hosts = hosts
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it to `app`; set security headers on every answer."""
        if scope["type"] == "websocket":  # the panel has none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                protect(MutableHeaders(scope=message), scope["path"])
            await send(message)

        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, protected)

    def _refusal(self, request: Request) -> Response | None:
        problem = (
            self._wrong_host(request)
            or _foreign_page(request)
            or self._missing_token(request)
            or _wrong_type(request)
        )
        return None if problem is None else calls.answer(problem)

    def _missing_token(self, request: Request) -> views.Problem | None:
        """Return the problem of a call below /api that lacks a required token, else None."""
        if self._token is None or not request.scope["path"].startswith("/api"):
            return None
        return None if self._token.admits_request(request) else _unauthenticated()

    def _wrong_host(self, request: Request) -> views.Problem | None:
        given = request.headers.getlist("host")
        name = host_name(given[0]) if len(given) == 1 else ""
        known = is_loopback_host(name) or name in self._hosts or name == _connected_to(request)
        if name and known:
            return None
        return views.Problem(
            title="unknown_host",
            status=421,
            detail="is not a name of the panel",
            field="Host",
            value=", ".join(given) or None,
            remedy="Open it at 127.0.0.1, or set TROUPE_PANEL_HOSTS to its names.",
        )


router = APIRouter(prefix="/session", include_in_schema=False)


class Token(BaseModel):
    """The cluster's token, as a person enters it."""

    model_config = ConfigDict(extra="forbid")

    token: str


@router.get("")
async def follow_link(request: Request, code: str) -> Response:
    """Open a session for the browser that follows a one-time link."""
    token: PanelToken | None = request.app.state.token
    if token is not None and not token.codes.redeem(code):
        return calls.problem_answer(
            "unauthenticated",
            401,
            "this link was already used, or comes from an earlier start of the panel",
            field="code",
            remedy="`troupe status` prints a new one.",
        )
    return _with_session(request, token, RedirectResponse("/", status_code=303))


@router.post("")
async def enter_token(request: Request, given: Token) -> Response:
    """Open a session for a browser whose user knows the token."""
    token: PanelToken | None = request.app.state.token
    if token is not None and not token.is_token(given.token):
        return calls.answer(_unauthenticated())
    return _with_session(request, token, Response(status_code=204))


def _with_session(request: Request, token: PanelToken | None, response: Response) -> Response:
    if token is not None:
        response.set_cookie(
            _cookie_name(request),
            token.codes.session(),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return response


def _cookie_name(request: Request) -> str:
    """Return the cookie's name, which contains the port, since browsers send cookies of a host to
    all of its ports."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"troupe-session-{port if port.isascii() and port.isdecimal() else request.url.scheme}"


def _unauthenticated() -> views.Problem:
    return views.Problem(
        title="unauthenticated",
        status=401,
        detail="this call needs the cluster's token",
        remedy="Send `Authorization: Bearer <TROUPE_TOKEN>` (an embedded cluster's is in "
        "`.troupe/token` of its data directory); in a browser open the link that `troupe up` "
        "and `troupe status` print.",
    )


def _foreign_page(request: Request) -> views.Problem | None:
    """Return the problem of a request by another site's page; None for the panel's page and for
    programs."""
    headers, path = request.headers, request.scope["path"]
    origins = headers.getlist("origin")
    if any(not _same_origin(one, headers.get("host", "")) for one in origins):
        return _foreign("Origin", ", ".join(origins))
    site = headers.get("sec-fetch-site", "none")
    followed_link = (
        request.method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and not path.startswith("/api")
    )
    if site in ("same-origin", "none") or followed_link:
        return None
    return _foreign("Sec-Fetch-Site", site)


def _foreign(field: str, value: str) -> views.Problem:
    return views.Problem(
        title="foreign_origin",
        status=403,
        detail="the request comes from another site's page; the panel answers only its own page "
        "and programs",
        field=field,
        value=value,
        remedy="Open the panel itself. A proxy in front of it must forward the browser's `Host` "
        "header unchanged.",
    )


def _wrong_type(request: Request) -> views.Problem | None:
    """Return the problem of a body that is neither empty nor JSON nor YAML, else None."""
    if request.method in SAFE_METHODS:
        return None
    headers = request.headers
    given = headers.getlist("content-type")
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if empty and not given:
        return None
    kind = given[0].partition(";")[0].strip().lower() if len(given) == 1 else ""
    if kind in (JSON_TYPE, *YAML_TYPES):
        return None
    return views.Problem(
        title="unsupported_media_type",
        status=415,
        detail="the body must be declared as JSON, or as a job's YAML",
        field="Content-Type",
        value=", ".join(given) or None,
        remedy=f"Send `Content-Type: {JSON_TYPE}`, or `{YAML_TYPES[0]}` for a job's "
        f"specification (curl: -H 'Content-Type: {YAML_TYPES[0]}').",
    )


def protect(headers: MutableHeaders, path: str) -> None:
    """Set the security headers of the answer at `path`."""
    headers["Content-Security-Policy"] = "; ".join(f"{k} {v}" for k, v in _POLICY.items())
    for name, value in _HEADERS.items():
        headers[name] = value
    if path.startswith(("/api", "/session")):
        headers.setdefault("Cache-Control", "no-store")


def host_name(authority: str) -> str:
    """Return the host in a name, an address or a `Host` header; empty if it is malformed."""
    text = authority.strip()
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"  # an IPv6 address in the settings
    return authority_host(text).removesuffix(".")


def _connected_to(request: Request) -> str:
    """Return the local address of the connection, which does not depend on DNS; "" where
    unknown."""
    server = request.scope.get("server")
    try:
        return str(ipaddress.ip_address(server[0])) if server else ""
    except ValueError:
        return ""


def _same_origin(origin: str, host: str) -> bool:
    """Return whether `origin` ("scheme://host:port") belongs to `host` ("host:port")."""
    scheme, separator, authority = origin.strip().lower().partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme)
    if not separator or default is None or not authority:
        return False
    return authority.removesuffix(default) == host.strip().lower().removesuffix(default)

"""Who may call the panel: the host name asked for, the page that asks, the type of what it sends.

A job is code that the cluster runs, so a page of any other website that a browser of the same
machine shows must not reach the panel. Three checks, each of which is enough against most of it:

- `Host` is loopback, the address of the connection, or configured (`TROUPE_PANEL_HOSTS`): a name
  of another site that resolves to this machine (DNS rebinding) is refused, on every address.
- `Origin` and `Sec-Fetch-Site`, which browsers send and pages cannot change, say that the page is
  the panel's own. Programs that are no browsers send neither.
- Bodies have a type that no HTML form and no simple cross-origin request can send.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.chassis.settings import ServiceSettings
from services.control_panel import problems, views

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
    """Host names, besides loopback, at which browsers reach the panel; separated by commas."""

    @property
    def host_names(self) -> frozenset[str]:
        """All names and addresses in `Host` that mean this panel, besides loopback."""
        given = [one for one in self.panel_hosts.split(",") if one.strip()]
        if self.host not in ("0.0.0.0", "::", ""):
            given.append(self.host)
        if self.advertise_address:
            given.append(self.advertise_address)
        return frozenset(host_name(one) for one in given)


class Panel(FastAPI):
    """The panel's application behind its access checks, which see every request first."""

    def __init__(self, *, hosts: Iterable[str], **options: object) -> None:
        """`hosts`: names in `Host` that mean this panel, besides loopback; others are FastAPI's."""
        super().__init__(**options)  # type: ignore[arg-type]
        self._hosts = frozenset(hosts)

    def build_middleware_stack(self) -> ASGIApp:
        """Outside of everything else, so that answers to failures are under the same headers."""
        return AccessGuard(super().build_middleware_stack(), self._hosts)


class AccessGuard:
    """ASGI application in front of `app` that refuses what other sites send."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: refused with a problem, or passed on; headers on every answer."""
        if scope["type"] == "websocket":  # the panel has none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                protect(MutableHeaders(scope=message), request.url.path)
            await send(message)

        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, protected)

    def _refusal(self, request: Request) -> Response | None:
        problem = self._wrong_host(request) or _foreign_page(request) or _wrong_type(request)
        return None if problem is None else problems.answer(problem)

    def _wrong_host(self, request: Request) -> views.Problem | None:
        given = request.headers.getlist("host")
        name = host_name(given[0]) if len(given) == 1 else ""
        if is_loopback_name(name) or name in self._hosts or name == _connected_to(request):
            return None
        return views.Problem(
            title="unknown_host",
            status=421,
            detail="this name does not mean the panel",
            field="Host",
            value=", ".join(given) or None,
            remedy="Open it at 127.0.0.1, or set TROUPE_PANEL_HOSTS to the names it is known by.",
        )


def _foreign_page(request: Request) -> views.Problem | None:
    """Why the page that asks is not the panel's; None: it is, or no browser asks."""
    headers, path = request.headers, request.url.path
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
        detail="a page of another site asks; the panel answers its own page, and programs",
        field=field,
        value=value,
        remedy="Open the panel itself. A proxy before it must pass `Host` on as the browser "
        "sent it.",
    )


def _wrong_type(request: Request) -> views.Problem | None:
    """Why a body of this type is not taken from anybody."""
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
        detail="bodies are JSON, or a job's YAML, and must say so",
        field="Content-Type",
        value=", ".join(given) or None,
        remedy=f"Send `Content-Type: {JSON_TYPE}`, or `{YAML_TYPES[0]}` for a job's "
        f"specification (curl: -H 'Content-Type: {YAML_TYPES[0]}').",
    )


def protect(headers: MutableHeaders, path: str) -> None:
    """Set what browsers must keep to with the answer at `path`."""
    headers["Content-Security-Policy"] = "; ".join(f"{k} {v}" for k, v in _POLICY.items())
    for name, value in _HEADERS.items():
        headers[name] = value
    if path.startswith("/api"):
        headers.setdefault("Cache-Control", "no-store")


def host_name(authority: str) -> str:
    """The name or address in "name:port", "[address]:port" or either alone; in small letters."""
    text = authority.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    if text.count(":") == 1:
        text = text.partition(":")[0]
    return text.removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether a browser that is asked for `name` can only mean its own machine."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _connected_to(request: Request) -> str:
    """The address of this machine that the connection came in at: no DNS has a part in it."""
    server = request.scope.get("server")
    try:
        return str(ipaddress.ip_address(server[0])) if server else ""
    except ValueError:
        return ""


def _same_origin(origin: str, host: str) -> bool:
    """Whether `origin` ("scheme://host:port") is where `host` ("host:port") is."""
    scheme, separator, authority = origin.strip().lower().partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme)
    if not separator or default is None or not authority:
        return False
    return authority.removesuffix(default) == host.strip().lower().removesuffix(default)

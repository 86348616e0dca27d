"""Authentication of callers: the header `authorization` that they send, and its check.

gRPC services, the transfer service and the panel share it. Another method is a class with `admits`,
a case in `authentication_of`, and what its callers send (`troupe/rpc/channel.py`).
"""

from __future__ import annotations

import hmac
from typing import Protocol

from pydantic import SecretStr

from troupe.rpc.errors import Unauthenticated

HEADER = "authorization"
_SCHEME = "Bearer"


class Authentication(Protocol):
    """A method by which callers show who they are."""

    def admits(self, authorization: str) -> bool:
        """Return whether a caller may call that sent this header; empty: it sent none."""


class ClusterToken:
    """The bearer token that all services and clients of a cluster have."""

    def __init__(self, token: SecretStr) -> None:
        # Bytes, since a header need not be ASCII.
        self._token = token.get_secret_value().encode()

    @property
    def header(self) -> str:
        """The header that callers send."""
        return f"{_SCHEME} {self._token.decode()}"

    def admits(self, authorization: str) -> bool:
        """Return whether the header has the token."""
        scheme, _, sent = authorization.partition(" ")
        return scheme.lower() == _SCHEME.lower() and self.is_token(sent)

    def is_token(self, sent: str) -> bool:
        """Return whether `sent` is the token, in a time that does not depend on `sent`."""
        return hmac.compare_digest(sent.encode("utf-8", "replace"), self._token)


def authentication_of(token: SecretStr | None) -> Authentication | None:
    """Return the method by which a service checks its callers; None: it admits all."""
    return None if token is None else ClusterToken(token)


def require(authentication: Authentication, authorization: str) -> None:
    """Raise `Unauthenticated` for a caller that may not call."""
    if not authentication.admits(authorization):
        raise Unauthenticated(
            "the bearer token is wrong" if authorization else "a bearer token is required",
            field="token",
            remedy="Set TROUPE_TOKEN to the token that the services were started with.",
        )

"""Who may ask what: two keys, one for everything but health and one for what changes the server.

| given at start         | generation, models, metrics, … | load, unload, mixes                                |
|------------------------|--------------------------------|----------------------------------------------------|
| neither key            | everybody                      | clients on this machine that speak to it by itself |
| --api-key              | that key                       | that key                                           |
| --admin-api-key        | everybody                      | the admin key                                      |
| both                   | either key                     | the admin key; 403 for the other                   |

/health asks for nothing.
"""

import hmac
import ipaddress

import fastapi
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import ForbiddenError, UnauthorizedError
from serving.responses import error_response

OPEN_PATH = "/health"  # the one route that asks for no key
FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


class Access:
    """The keys of a server, and what a request's key opens.

    Args:
      api_key: of everything; None asks for none.
      admin_api_key: of what changes the server; None for `api_key`, or this machine alone where that is None too.
    """

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key

    def is_known(self, scope: Scope) -> bool:
        """True if the request may use the routes that change nothing."""
        return self._api_key is None or _bears(scope, self._api_key) or self._is_admin(scope)

    async def require_admin(self, request: fastapi.Request) -> None:
        """Lets a request pass to a route that changes the server.

        Raises:
          UnauthorizedError: If its key is missing or wrong.
          ForbiddenError: If its key is the other one, or no key is configured and it comes from elsewhere.
        """
        if self._admin_api_key is None:
            if not is_from_this_machine(request.scope):
                raise ForbiddenError(
                    "this server has no key, so what changes it may only be asked on the machine itself, by a "
                    "loopback address; start it with --admin-api-key to allow it to whoever has that key",
                    code="admin_local_only",
                )
        elif not self._is_admin(request.scope):
            if self._api_key is not None and _bears(request.scope, self._api_key):
                raise ForbiddenError(
                    "this key does not open what changes the server; send the one of --admin-api-key",
                    code="admin_key_required",
                )
            raise UnauthorizedError("the admin API key is missing or wrong; send 'Authorization: Bearer ADMIN_KEY'")

    def _is_admin(self, scope: Scope) -> bool:
        return self._admin_api_key is not None and _bears(scope, self._admin_api_key)


class AccessMiddleware:
    """Stands before the routing, so that no path, known or not, is open by another spelling."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == OPEN_PATH or self._access.is_known(scope):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("the API key is missing or wrong; send the header 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)


def is_from_this_machine(scope: Scope) -> bool:
    """True for a client on a loopback address that calls the server by one.

    The name it calls counts too: a web page may make a browser here talk to its own name, turned to a loopback address,
    and a proxy here passes on what comes from anywhere.
    """
    headers = Headers(scope=scope)
    client = scope.get("client")
    host = headers.get("host", "").rpartition(":")
    name = host[0] if host[2].isdigit() else headers.get("host", "")
    return (
        client is not None
        and _is_loopback(client[0])
        and (name == "localhost" or _is_loopback(name.strip("[]")))
        and not any(header in headers for header in FORWARDING_HEADERS)
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _bears(scope: Scope, key: str) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {key}".encode())

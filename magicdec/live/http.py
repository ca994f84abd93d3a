"""Reads one address: GET only, within a size and a time, and never from another host than the one
that was given.

A token is sent as a bearer token where the environment has one (`TOKEN_VARIABLE`); it is not
printed, not recorded, and leaves with no request to another host, since no redirect to another one
is followed. Proxies are not used.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from magicdec import __version__
from magicdec.errors import ConfigError, ServerError
from magicdec.units import MIB, format_bytes

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "MAGICDEC_SERVER_TOKEN"
TIMEOUT_S = 10.0
RESPONSE_LIMIT_BYTES = 16 * MIB
MAX_REDIRECTS = 3
DEFAULT_PORTS = {"http": 80, "https": 443}
WANTS_TOKEN = (
    f": it wants a token; give it in the environment variable {TOKEN_VARIABLE}"
)
HINTS = {
    401: WANTS_TOKEN,
    403: WANTS_TOKEN,
    404: ": is this the server's metrics address?",
}


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, without anything secret in it."""

    scheme: str
    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if ":" in self.host:
            host = f"[{self.host}]"
        else:
            host = self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def at(self, path: str) -> Address:
        return dataclasses.replace(self, path=path)


def parse_address(text: str) -> Address:
    """ "localhost:8000" or "https://host/metrics". Raises ConfigError for what is not a plain
    http(s) address.
    """
    url = text
    if "://" not in text:
        url = f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"'{text}' is not an address: {error}") from None
    if any((parts.username, parts.password, parts.query, parts.fragment)):
        raise ConfigError(
            "an address has no user name, password, query or fragment, which would be recorded; "
            f"a token is read from the environment variable {TOKEN_VARIABLE}"
        )
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(
            f"'{text}' is not an http or https address like http://localhost:8000"
        )
    path = ""
    if parts.path != "/":
        path = parts.path
    if not path.isprintable() or " " in path:
        raise ConfigError("an address's path cannot hold spaces or control characters")
    if port is None:
        port = DEFAULT_PORTS[parts.scheme]
    return Address(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port,
        path=path,
    )


def client(address: Address, *, timeout_s: float, **options: Any) -> httpx.AsyncClient:
    """A client for one address: no proxies, redirects or compression, the environment's token as a
    header, and the system's own certificates.

    Raises ConfigError for a token that cannot be sent in a header.
    """
    import httpx

    secret = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds characters that a header cannot carry"
        )
    headers = {"Accept-Encoding": "identity", "User-Agent": f"magicdec/{__version__}"}
    if secret:
        headers |= {"Authorization": f"Bearer {secret}"}
    certificates: ssl.SSLContext | bool = False
    if address.scheme == "https":
        certificates = ssl.create_default_context()
    timeout = httpx.Timeout(timeout_s, connect=TIMEOUT_S)
    return httpx.AsyncClient(
        headers=headers,
        timeout=timeout,
        trust_env=False,
        verify=certificates,
        **options,
    )


def get(
    address: Address,
    *,
    timeout_s: float = TIMEOUT_S,
    limit_bytes: int = RESPONSE_LIMIT_BYTES,
) -> bytes:
    """The body of an address's answer.

    Raises ServerError: unreachable, slower than `timeout_s` in all, larger than `limit_bytes`, cut
    short, not status 200, or a redirect to another host.
    """
    import httpx

    async def answer() -> bytes:
        async with (
            asyncio.timeout(timeout_s),
            client(address, timeout_s=timeout_s) as session,
        ):
            request = session.build_request("GET", str(address))
            for _ in range(MAX_REDIRECTS + 1):
                response = await session.send(request, stream=True)
                if response.status_code != httpx.codes.OK:
                    request = _following(response, address)
                    continue
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > limit_bytes:
                        raise ServerError(
                            f"{request.url} answers with more than {format_bytes(limit_bytes)}; "
                            "nothing was read"
                        )
                return bytes(body)
        raise ServerError(f"{address} redirects more than {MAX_REDIRECTS} times")

    try:
        return asyncio.run(answer())
    except (TimeoutError, httpx.TimeoutException):
        raise ServerError(f"{address} did not answer within {timeout_s:g} s") from None
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        OSError,
        ValueError,
    ) as error:  # the last two of a damaged Location
        raise ServerError(
            f"cannot read {address}: {str(error) or type(error).__name__}"
        ) from None


def _following(response: httpx.Response, address: Address) -> httpx.Request:
    """The request that a redirect asks for. Raises ServerError for another answer, and for a
    redirect elsewhere.
    """
    request, status = response.next_request, response.status_code
    if request is None:
        raise ServerError(
            f"{response.url} answers with status {status}{HINTS.get(status, '')}"
        )
    url = request.url
    origin = url.scheme, url.host, url.port or DEFAULT_PORTS.get(url.scheme)
    if (
        origin != (address.scheme, address.host, address.port)
        or url.userinfo
        or url.query
    ):
        raise ServerError(
            f"{response.url} redirects to another address, which is not followed; give that one "
            "itself"
        )
    return request

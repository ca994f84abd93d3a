"""Reads one address: GET only, within a size and a time, and never from another host than the one that was given.

A token is sent as a bearer token where the environment has one (`TOKEN_VARIABLE`); it is not printed, not recorded, and
leaves with no request to another host, since no redirect to another one is followed. Proxies are not used.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from magicdec import __version__
from magicdec.errors import ConfigError, ServerError
from magicdec.units import MIB, format_bytes

TOKEN_VARIABLE = "MAGICDEC_SERVER_TOKEN"
TIMEOUT_S = 10.0
LIMIT_BYTES = 16 * MIB
MAX_REDIRECTS = 3
CHUNK_BYTES = 64 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, without anything secret in it."""

    scheme: str
    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    def at(self, path: str) -> Address:
        return Address(scheme=self.scheme, host=self.host, port=self.port, path=path)


def parse_address(text: str) -> Address:
    """ "localhost:8000" or "https://host/metrics". Raises ConfigError for what is not a plain http(s) address."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"'{text}' is not an address: {error}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "an address has no user name, password, query or fragment, which would be recorded; "
            f"a token is read from the environment variable {TOKEN_VARIABLE}"
        )
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"'{text}' is not an http or https address like http://localhost:8000")
    path = parts.path if parts.path != "/" else ""
    if not path.isprintable() or " " in path:
        raise ConfigError("an address's path cannot hold spaces or control characters")
    return Address(
        scheme=parts.scheme, host=parts.hostname, port=DEFAULT_PORTS[parts.scheme] if port is None else port, path=path
    )


def token() -> str | None:
    """The bearer token that the environment gives. Raises ConfigError where it cannot be sent in a header."""
    value = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"{TOKEN_VARIABLE} holds characters that a header cannot carry")
    return value or None


def get(address: Address, *, timeout_s: float = TIMEOUT_S, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """What the address answers.

    Raises ServerError: unreachable, slower than `timeout_s` in all, larger than `limit_bytes`, cut short, not status
    200, or a redirect to another host.
    """
    asked = address
    for _ in range(MAX_REDIRECTS + 1):
        status, location, body = _get_once(address, timeout_s=timeout_s, limit_bytes=limit_bytes)
        if status == http.client.OK:
            return body
        if status not in (301, 302, 303, 307, 308) or not location:
            raise ServerError(f"{address} answers with status {status}" + _hint(status))
        address = _redirected(address, location)
    raise ServerError(f"{asked} redirects more than {MAX_REDIRECTS} times")


def _hint(status: int) -> str:
    if status in (401, 403):
        return f": it wants a token; give it in the environment variable {TOKEN_VARIABLE}"
    return ": is this the server's metrics address?" if status == 404 else ""


def _redirected(address: Address, location: str) -> Address:
    target = urlsplit(urljoin(str(address), location))
    port = target.port or DEFAULT_PORTS.get(target.scheme, 0)
    if (target.scheme, target.hostname, port) != address.origin or target.username or target.query:
        raise ServerError(f"{address} redirects to another address, which is not followed; give that one itself")
    return address.at(target.path)


def _get_once(address: Address, *, timeout_s: float, limit_bytes: int) -> tuple[int, str | None, bytes]:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=timeout_s)
    late = threading.Event()

    def stop() -> None:
        late.set()
        with suppress(OSError):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, stop)  # a socket's own time-out starts anew with each byte
    timer.daemon = True
    timer.start()
    try:
        headers = {"Accept": "text/plain", "Accept-Encoding": "identity", "User-Agent": f"magicdec/{__version__}"}
        secret = token()
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        connection.request("GET", address.path or "/", headers=headers)
        response = connection.getresponse()
        body = bytearray()
        while response.status == http.client.OK and (chunk := response.read1(CHUNK_BYTES)):
            body += chunk
            if len(body) > limit_bytes:
                raise ServerError(f"{address} answers with more than {format_bytes(limit_bytes)}; nothing was read")
        if late.is_set():
            raise TimeoutError
        announced = response.getheader("Content-Length", "")
        if response.status == http.client.OK and announced.isdecimal() and len(body) != int(announced):
            raise ServerError(f"{address} ended its answer after {len(body)} of {announced} bytes")
        return response.status, response.getheader("Location"), bytes(body)
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise ServerError(f"{address} did not answer within {timeout_s:g} s") from None
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServerError(f"cannot read {address}: {what}") from None
    finally:
        timer.cancel()
        connection.close()

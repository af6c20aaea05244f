"""One HTTP request within a bound of seconds and of bytes, whatever the other end sends.

Every byte of status, headers and body comes through `_Bounded.recv_into`, so that neither a byte a second nor a body
without an end, in whatever part of the protocol, lasts longer or grows larger than was asked for.
"""

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.ground.terminal import visible

CONNECT_S = 5.0
_PIECE = 2**16  # bytes read or sent at once
_SHOWN = 300  # characters of an answer that a message quotes


class Fault(Exception):
    """A server did not answer, or not as it should; another one, or the same later, may. The message names it."""


def request(
    method: str,
    url: str,
    body: Any = None,
    *,
    seconds: float,
    most_bytes: int,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of the answer to a request, once it is whole.

    Args:
      url: http://host:port/path; redirects are not followed.
      body: a value that is sent as JSON, or an open file whose bytes are sent in pieces; None: nothing.
      seconds: from now to the last byte.
      most_bytes: of the answer, its headers included; a compressed one is refused, since it has no bound.

    Raises:
      Fault: no whole answer of status 200 came within the bounds, for whatever reason; the message names the server.
    """
    parts = urllib.parse.urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc}"
    place = url.removeprefix(address)
    connection = _Connection(address, time.monotonic() + seconds, most_bytes)
    told = dict(headers or {})
    if body is not None and not hasattr(body, "read"):
        body, told["Content-Type"] = json.dumps(body).encode(), "application/json"
    try:
        # A server that refuses a large body says so and does not read it to its end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, place, body=body, headers=told)
        said = connection.getresponse()
        if said.headers.get("Content-Encoding", "identity") != "identity":
            raise Fault(f"{address} gave an answer that is compressed, which it was not asked for")
        data = b"".join(iter(lambda: said.read(_PIECE), b""))
        if said.length:
            raise Fault(f"{address} gave an answer that is cut off: {shown(data[-80:])!r}")
    except TimeoutError as error:
        raise Fault(f"{address} gave no answer within {seconds:g} s") from error
    except _TooLong as error:
        raise Fault(f"{address} gave an answer of more than {most_bytes} bytes, the most that was asked for") from error
    except OSError as error:
        raise _silent(address, error) from error
    except (http.client.HTTPException, ValueError) as error:
        raise Fault(f"{address} gave an answer that is cut off or no HTTP: {shown(repr(error))}") from error
    finally:
        connection.close()
    if said.status != http.client.OK:
        raise Fault(f"{address}{place.partition('?')[0]} says {said.status}: {shown(data)}")
    return data


def shown(said: bytes | str) -> str:
    """Return a server's words as a message may quote them: short, in one line, without what would steer a terminal."""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return visible(" ".join(text[: 4 * _SHOWN].split()))[:_SHOWN]


def _silent(address: str, error: OSError) -> Fault:
    start = "start it as docs/engines.md says, a teacher as docs/distillation.md"
    return Fault(f"{address} does not answer ({error.strerror or error}); {start}")


class _TooLong(Exception):
    pass


class _Bounded(socket.socket):
    """A connected socket that gives and takes nothing after a time, and no more than so many bytes."""

    def __init__(self, plain: socket.socket, end: float, most: int):
        super().__init__(fileno=plain.detach())
        self._end, self._left = end, most

    def _wait(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)

    def recv_into(self, *arguments: Any) -> int:
        self._wait()
        count = super().recv_into(*arguments)
        self._left -= count
        if self._left < 0:
            raise _TooLong
        return count

    def sendall(self, *arguments: Any) -> None:
        self._wait()
        super().sendall(*arguments)


class _Connection(http.client.HTTPConnection):
    def __init__(self, address: str, end: float, most: int):
        super().__init__(urllib.parse.urlsplit(address).netloc, timeout=CONNECT_S, blocksize=_PIECE)
        self._address, self._end, self._most = address, end, most

    def connect(self) -> None:
        try:
            super().connect()
        except OSError as error:
            raise _silent(self._address, error) from error
        self.sock = _Bounded(self.sock, self._end, self._most)

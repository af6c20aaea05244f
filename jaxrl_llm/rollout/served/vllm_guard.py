"""The door of a vLLM server, as ASGI middleware: it lets in who knows the token, and takes weights over HTTP.

    PUT /weights/LABEL/FILE    with Content-Length and Repr-Digest: sha-256=:BASE64: (RFC 9530)

The bytes go to the disk as they come, and the file has its name once its digest is right. Weights are taken from who
knows the token alone, so a server that has none takes none.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN, RECEIVED = "JAXRL_LLM_TOKEN", "JAXRL_LLM_RECEIVED"
_UPLOAD = re.compile(
    r"/weights/([0-9a-f]{8}-\d{1,9})/((?:model[\w-]{0,40}\.safetensors(?:\.index\.json)?)|config\.json)"
)

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Guard:
    """The middleware that every request passes before vLLM sees it."""

    def __init__(self, app: App):
        self._app = app
        self._token = os.environ.get(TOKEN, "")

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        told = headers.get("authorization", b"")
        if self._token and not hmac.compare_digest(told, f"Bearer {self._token}".encode()):
            return await _say(send, 401, {"error": f"{TOKEN} of the client is not that of the server"})
        if scope["type"] != "http" or scope["method"] != "PUT" or not scope["path"].startswith("/weights/"):
            return await self._app(scope, receive, send)
        if not self._token:
            return await _say(send, 403, {"error": f"a server without {TOKEN} takes no weights over HTTP"})
        found = _UPLOAD.fullmatch(scope["path"])
        length = headers.get("content-length", b"")
        digest = re.fullmatch(rb"sha-256=:([\w+/=]{44}):", headers.get("repr-digest", b""))
        if found is None or not length.isdigit() or digest is None:
            return await _say(send, 400, {"error": "give PUT /weights/LABEL/FILE, Content-Length and Repr-Digest"})
        return await _say(send, *await _take(receive, found[1], found[2], int(length), base64.b64decode(digest[1])))


async def _take(receive: Any, label: str, name: str, length: int, wanted: bytes) -> tuple[int, dict[str, str]]:
    """Status and words of an answer, once a file is there or will not be."""
    root = Path(os.environ[RECEIVED])
    for old in root.iterdir():
        if old.name != label:
            shutil.rmtree(old, ignore_errors=True)
    if length > shutil.disk_usage(root).free:
        return 507, {"error": f"{length} bytes do not fit into {root}"}
    folder = root / label
    folder.mkdir(exist_ok=True)
    partial, digest, left, more = folder / f"{name}.partial", hashlib.sha256(), length, True
    with partial.open("wb") as file:
        while more and left >= 0:
            message = await receive()
            piece, more = message.get("body", b""), message.get("more_body", False)
            left -= len(piece)
            file.write(piece)
            digest.update(piece)
    if left or not hmac.compare_digest(digest.digest(), wanted):
        partial.unlink()
        return 400, {"error": f"{name} did not arrive as it was sent"}
    partial.rename(folder / name)
    return 200, {"folder": str(folder)}


async def _say(send: Any, status: int, said: dict[str, str]) -> None:
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""Servers on this machine that stand for others, each while a test runs."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Says nothing on the terminal, and answers with bytes or JSON."""

    def log_message(self, *_):
        pass

    def say(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """A client that has read enough closes its connection."""


@contextlib.contextmanager
def served(handler):
    """The address of a server with this handler."""
    server = _Server(("localhost", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A hub on this machine: the addresses that huggingface_hub asks when it fetches a snapshot, and what is counted."""

import collections
import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REFUSALS = {"missing": (401, "RepoNotFound"), "gated": (403, "GatedRepo"), "lost": (404, "RevisionNotFound")}


@contextlib.contextmanager
def fake_hub(repos):
    """(its address, downloads of each file) of a hub with these repositories, {"models/OWNER/NAME": folder}.

    A name that is not among them is refused as private; gated/... and the revision lost are refused too.
    """
    downloads = collections.Counter()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def refuse(self, why):
            status, code = _REFUSALS[why]
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_HEAD(self):
            self.do_GET(body=False)

        def do_GET(self, body=True):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if len(parts) < 4:  # questions of the library about itself
                return self.refuse("lost")
            api = parts[0] == "api"
            parts = parts[api:]
            kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
            repo, verb, revision, name = f"{kind}/{parts[0]}/{parts[1]}", parts[2], parts[3], "/".join(parts[4:])
            if repo not in repos:
                return self.refuse("gated" if "gated/" in repo else "missing")
            if revision not in ("main", COMMIT):
                return self.refuse("lost")
            folder = Path(repos[repo])
            headers = {"X-Repo-Commit": COMMIT}
            if verb == "resolve":
                content = (folder / name).read_bytes()
                headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
                if body:
                    downloads[name] += 1
                    time.sleep(0.2)  # so that others come to ask for the same
            elif verb == "tree":
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                names = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
                content = json.dumps([{"type": "file", "path": p, "size": n, "oid": "0"} for p, n in names]).encode()
            else:
                content = json.dumps({"id": repo.partition("/")[2], "sha": COMMIT, "siblings": []}).encode()
            self.send_response(200)
            for header, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloads
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

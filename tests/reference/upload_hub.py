"""A hub on this machine that takes pushes: the addresses that huggingface_hub asks when it uploads a folder."""

import base64
import contextlib
import json
from urllib.parse import urlsplit

from tests.reference.fake_server import Handler, served

COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


@contextlib.contextmanager
def upload_hub(*, token="hf_writes"):
    """(its address, {"OWNER/NAME": {"private": ..., "files": {path: bytes}, "messages": [...]}}): the repositories that
    pushes make. Only this token may write."""
    repos = {}

    class Asked(Handler):
        def do_GET(self):
            _, _, _, *repo = urlsplit(self.path).path.split("/")  # /api/models/OWNER/NAME[/tree/REVISION]
            owner_name, verb = "/".join(repo[:2]), repo[2:]
            if owner_name not in repos:
                return self.say(404, {"error": "Repository not found"})
            files = repos[owner_name]["files"]
            listed = [{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in sorted(files)]
            siblings = [{"rfilename": path} for path in sorted(files)]
            about = {"id": owner_name, "sha": COMMIT, "siblings": siblings}
            return self.say(200, listed if verb[:1] == ["tree"] else about)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Bearer {token}":
                return self.say(403, {"error": "You don't have the rights to create a model under that namespace"})
            path = urlsplit(self.path).path
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                url = f"http://{self.headers['Host']}/{name}"
                if name in repos:
                    return self.say(409, {"error": "You already created this model repo", "url": url})
                repos[name] = {"private": asked.get("visibility") == "private", "files": {}, "messages": []}
                return self.say(200, {"url": url})
            if path == "/api/validate-yaml":
                assert json.loads(body)["content"].startswith("---\n")
                return self.say(200, {"errors": [], "warnings": []})
            _, _, _, owner, name, verb, _ = path.split("/")
            if verb == "preupload":
                asked = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in asked]
                return self.say(200, {"files": modes})
            assert verb == "commit", self.path
            repo = repos[f"{owner}/{name}"]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    repo["messages"].append(line["value"]["summary"])
                elif line["key"] == "file":
                    repo["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                else:
                    assert line["key"] == "deletedFile"
                    del repo["files"][line["value"]["path"]]
            url = f"http://{self.headers['Host']}/{owner}/{name}/commit/{COMMIT}"
            return self.say(200, {"commitUrl": url, "commitOid": COMMIT})

    with served(Asked) as address:
        yield address, repos

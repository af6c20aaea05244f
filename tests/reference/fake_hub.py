"""A hub on this machine: the addresses that huggingface_hub asks when it fetches a snapshot, and what is counted."""

import collections
import contextlib
import hashlib
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.reference.fake_server import Handler, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REFUSALS = {"missing": (401, "RepoNotFound"), "gated": (403, "GatedRepo"), "lost": (404, "RevisionNotFound")}


@contextlib.contextmanager
def fake_hub(repos):
    """(its address, downloads of each file) of a hub with these repositories, {"models/OWNER/NAME": folder}.

    A name that is not among them is refused as private; gated/... and the revision lost are refused too.
    """
    downloads = collections.Counter()

    class Asked(Handler):
        def refuse(self, why):
            status, code = _REFUSALS[why]
            self.say(status, X_Error_Code=code)

        def do_GET(self):
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if len(parts) < 4:  # questions of the library about itself
                return self.refuse("lost")
            api = parts[0] == "api"
            parts = parts[api:]
            kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
            repo, name = f"{kind}/{parts[0]}/{parts[1]}", "/".join(parts[4:])
            verb, revision = parts[2:4] or ("revision", "main")
            if repo not in repos:
                return self.refuse("gated" if "gated/" in repo else "missing")
            if revision not in ("main", COMMIT):
                return self.refuse("lost")
            folder = Path(repos[repo])
            headers = {"X_Repo_Commit": COMMIT}
            if verb == "resolve":
                content = (folder / name).read_bytes()
                headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
                if self.command != "HEAD":
                    downloads[name] += 1
                    time.sleep(0.2)  # so that others come to ask for the same
            elif verb == "tree":
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                names = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
                content = [{"type": "file", "path": p, "size": n, "oid": "0"} for p, n in names]
            else:
                names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
                siblings = [{"rfilename": name} for name in names]
                content = {"id": repo.partition("/")[2], "sha": COMMIT, "siblings": siblings}
            return self.say(200, content, **headers)

        do_HEAD = do_GET

    with served(Asked) as address:
        yield address, downloads

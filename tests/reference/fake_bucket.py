"""A bucket on this machine: what TensorStore and gcsfs ask of Google Cloud Storage, with generations as it has them."""

import contextlib
import itertools
import json
import re
import threading
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.reference.fake_server import Handler, served

_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?(?:/rewriteTo/b/[^/]+/o/([^/]+))?$")


@contextlib.contextmanager
def fake_bucket():
    """(the environment in which gs:// is this machine, {name: content} of all objects of its one bucket)."""
    objects, generations, counter, lock = {}, {}, itertools.count(1), threading.Lock()

    class Asked(Handler):
        protocol_version = "HTTP/1.1"

        def asked(self):
            url = urlsplit(self.path)
            bucket, *names = (_OBJECT.match(url.path) or re.match("(?:)()()()", "")).groups()
            return bucket, [name and unquote(name) for name in names], dict(parse_qsl(url.query))

        def fails(self, name, query):
            """Whether a condition on the object's generation does not hold; the answer is then given."""
            here = str(generations.get(name, 0))
            if query.get("ifGenerationMatch", here) != here:
                self.say(412, {"error": {"code": 412}})
                return True
            if query.get("ifGenerationNotMatch") == here:
                self.say(304)
                return True
            return False

        def put(self, name, content):
            objects[name], generations[name] = content, next(counter)
            return self.described(name)

        def described(self, name):
            g = str(generations[name])
            here = f"http://{self.headers['Host']}/download/storage/v1/b/bucket/o/{name.replace('/', '%2F')}?alt=media"
            told = {
                "bucket": "bucket",
                "name": name,
                "size": str(len(objects[name])),
                "generation": g,
                "mediaLink": here,
            }
            times = {"timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z"}
            return told | times | {"metageneration": "1", "kind": "storage#object"}

        def do_GET(self):
            if urlsplit(self.path).path == "/storage/v1/b/bucket":
                return self.say(200, {"kind": "storage#bucket", "name": "bucket", "id": "bucket"})
            bucket, (name, _), query = self.asked()
            with lock:
                if bucket == "bucket" and not name:
                    return self.say(200, self.listed(**query))
                if bucket == "bucket" and self.fails(name, query):
                    return None
                if bucket != "bucket" or name not in objects:
                    return self.say(404, {"error": {"code": 404, "message": "none"}})
                if query.get("alt") != "media":
                    return self.say(200, self.described(name))
                content, told = objects[name], {"x_goog_generation": generations[name]}
                if span := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
                    told["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
                    return self.say(206, content[first : last + 1], **told)
                return self.say(200, content, **told)

        def listed(self, prefix="", delimiter="", startOffset="", endOffset="\uffff", maxResults=0, **_):
            names = [name for name in sorted(objects) if name.startswith(prefix) and startOffset <= name < endOffset]
            below = {
                name: prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in names if delimiter
            }
            inside = {name: folder for name, folder in below.items() if delimiter in name[len(prefix) :]}
            items = [self.described(name) for name in names if name not in inside]
            return {"kind": "storage#objects", "items": items, "prefixes": sorted(set(inside.values()))}

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            _, (name, target), query = self.asked()
            if self.path.startswith("/batch/"):
                return self.batch(content)
            with lock:
                if target:
                    done = self.put(target, objects[name])
                    return self.say(200, {"kind": "storage#rewriteResponse", "done": True, "resource": done})
                if query.get("uploadType") == "multipart":
                    edge = b"--" + re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
                    told, held = content.split(edge)[1:3]
                    query["name"] = json.loads(told.partition(b"{")[1] + told.partition(b"{")[2])["name"]
                    content = re.split(rb"\r?\n\r?\n", held, maxsplit=1)[1].removesuffix(b"\n").removesuffix(b"\r")
                if query.get("uploadType") == "resumable":
                    given = query.get("name") or json.loads(content)["name"]
                    where = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o?name={given}&upload_id=1"
                    return self.say(200, Location=where)
                return None if self.fails(query["name"], query) else self.say(200, self.put(query["name"], content))

        do_PUT = do_POST

        def batch(self, content):
            edge = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1]
            parts = []
            for path in re.findall(rb"DELETE (\S+)", content):
                name = unquote(_OBJECT.match(path.decode().split("?")[0])[2])
                with lock:
                    objects.pop(name, None), generations.pop(name, None)
                parts.append(f"--{edge}\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n\r\n")
            whole = "".join([*parts, f"--{edge}--"]).encode()
            self.say(200, whole, Content_Type=f"multipart/mixed; boundary={edge}")

        def do_DELETE(self):
            _, (name, _), query = self.asked()
            with lock:
                if not self.fails(name, query):
                    found = objects.pop(name, None)
                    generations.pop(name, None)
                    self.say(404 if found is None else 204)

    with served(Asked) as here:
        environment = {
            "STORAGE_EMULATOR_HOST": here,  # gcsfs
            "TENSORSTORE_GCS_HTTP_URL": here,
            "TENSORSTORE_GCE_METADATA_SERVER": "http://localhost:1",  # there are no credentials to ask for
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        yield environment, objects


if __name__ == "__main__":
    with fake_bucket() as (environment, _):
        print(" ".join(f"{name}={value}" for name, value in environment.items()), flush=True)
        threading.Event().wait()

"""As much of the Hugging Face hub, on this machine, as streaming a dataset of it by name needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve_dataset(name: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve one dataset of these files; gives the endpoint for HF_ENDPOINT."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = urllib.parse.unquote(self.path.partition("?")[0])
            tree = re.fullmatch(f"/api/datasets/{name}/tree/[^/]+/?(.*)", path)
            resolved = re.fullmatch(f"/datasets/{name}/resolve/[^/]+/(.*)", path)
            if tree:
                self.answer(json.dumps(self.entries(tree.group(1))).encode())
            elif path.startswith(f"/api/datasets/{name}"):
                siblings = [{"rfilename": file} for file in files]
                about = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False}
                self.answer(json.dumps({**about, "tags": [], "siblings": siblings}).encode())
            elif resolved and resolved.group(1) in files:
                self.answer(files[resolved.group(1)])
            else:
                code = "EntryNotFound" if name in path else "RepoNotFound"
                self.answer(b"", 404, {"X-Error-Code": code})

        def entries(self, folder: str) -> list[dict]:
            prefix = folder + "/" if folder else ""
            inside = [file for file in files if file.startswith(prefix)]
            folders = {
                prefix + file[len(prefix) :].split("/")[0] for file in inside if "/" in file[len(prefix) :]
            }
            return [
                *({"type": "directory", "path": path, "oid": COMMIT, "size": 0} for path in sorted(folders)),
                *(
                    {"type": "file", "path": file, "size": len(files[file]), "oid": _hash(files[file])}
                    for file in inside
                    if "/" not in file[len(prefix) :]
                ),
            ]

        def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None):
            extra = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": COMMIT, **(headers or {})}
            if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
                extra["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                content, status = content[first : last + 1], 206
            self.send_response(status)
            for key, value in {**extra, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

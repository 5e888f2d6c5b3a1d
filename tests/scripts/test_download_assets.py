"""The script against a small hub on this machine, and against none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="makes the tokenizer that is downloaded")

from tests.data.test_huggingface_tokenizers import trained
from titanforge.data import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {
        "tokenizer.json": trained("llama3", 400).to_str().encode(),
        "config.json": b"{}",
        "model.safetensors": b"heavy",
        "original/README": b"text",
    }


@pytest.fixture(scope="module")
def endpoint(files):
    """What of the hub's interface a download needs: the list of files, and each of them."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/name/revision/"):
                siblings = [{"rfilename": name} for name in files]
                return self.answer(
                    json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
                )
            if path.startswith("/api/models/owner/name/tree/"):
                entries = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for name, content in files.items()
                ]
                return self.answer(json.dumps(entries).encode())
            if path.startswith(("/owner/gated", "/api/models/owner/gated")):
                return self.answer(b"", 403, {"X-Error-Code": "GatedRepo"})
            _, _, name = path.partition(f"/owner/name/resolve/{COMMIT}/")
            if name in files:
                return self.answer(files[name])
            self.answer(b"", 404, {"X-Error-Code": "RepoNotFound"})

        def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None):
            self.send_response(status)
            etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            for key, value in {"Content-Length": str(len(content)), **etag, **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run(tmp_path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    script = [sys.executable, str(ROOT / "scripts" / "download_assets.py"), *arguments]
    script += ["--local_dir", str(tmp_path / "assets")]
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)


def test_the_tokenizer_and_nothing_else_is_brought(tmp_path, endpoint, files):
    done = run(tmp_path, endpoint, "owner/name")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "assets" / "name"
    assert (folder / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    assert not (folder / "model.safetensors").exists()
    tokenizer = build_tokenizer("auto", str(folder))
    assert f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens" in done.stdout
    assert f'model.hf_assets_path = "{folder}"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("owner/none",), "no model 'owner/none' on the hub, or a private one"),
        (("owner/gated",), "owner/gated is gated: accept its conditions"),
        (("owner/name", "--files", "no.such"), "owner/name holds none of no.such"),
        (("a b//c",), "'a b//c': "),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path, endpoint, arguments, message):
    done = run(tmp_path, endpoint, *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_without_a_network_the_way_out_is_said(tmp_path):
    done = run(tmp_path, "http://127.0.0.1:9", "owner/name")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("download_assets: ")]
    assert "hub cannot be reached for owner/name" in line and "Run this where there is a network" in line

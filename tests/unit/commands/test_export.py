"""The upload of `export --push`: the client of the hub against a server here."""

import base64
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from megatron_rl.commands.export import check_push, push
from megatron_rl.config import ConfigError


class Hub(BaseHTTPRequestHandler):
    """Answer what the client asks of the hub when it uploads small files."""

    repositories: dict
    protocol_version = "HTTP/1.1"

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def is_refused(self):
        if refused := self.headers["Authorization"] != "Bearer hf_good":
            self.answer({"error": "Invalid user token."}, 401)
        return refused

    def do_GET(self):
        if self.is_refused():
            return None
        if self.path == "/api/whoami-v2":
            return self.answer({"name": "ann", "orgs": [{"name": "lab"}], "auth": {}})
        return self.answer({"sha": "0" * 40, "id": "lab/m", "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.is_refused():
            return None
        if self.path == "/api/repos/create":
            self.repositories[json.loads(body)["name"]] = json.loads(body)
            return self.answer({"url": f"{constants.ENDPOINT}/lab/m"})
        if "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]  # fmt: skip
            return self.answer({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {line["value"]["path"]: base64.b64decode(line["value"]["content"])
                 for line in lines if line["key"] == "file"}  # fmt: skip
        self.repositories["files"] = files
        return self.answer({"commitUrl": f"{constants.ENDPOINT}/lab/m/commit/1", "commitOid": "1"})

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    Hub.repositories = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield Hub.repositories
    server.shutdown()
    server.server_close()


def test_folder_is_uploaded_as_it_is(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x00\xff")
    check_push("lab/m", tmp_path)
    assert push("lab/m", tmp_path) == f"{constants.ENDPOINT}/lab/m"
    assert hub["m"]["organization"] == "lab" and hub["m"]["visibility"] == "private"
    assert hub["files"] == {"config.json": b"{}", "model.safetensors": b"\x00\xff"}


def test_upload_that_the_hub_would_refuse_is_refused_before_the_export(hub, tmp_path, monkeypatch):
    for name, output in (
        ("m", "give a name on the hub as OWNER/NAME"), ("lab/m@v1", "give a name on the hub as"),
        ("other/m", "ann is logged in, who may write for ann, lab and not for other"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=output):
            check_push(name, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(ConfigError, match=r"no login at the hub .*; run hf auth login, or leave"):
        check_push("lab/m", tmp_path)
    with pytest.raises(ConfigError, match=r"is complete: run hf upload lab/m"):
        push("lab/m", tmp_path / "nothing")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"no login at the hub .*; run hf auth login, or leave"):
        check_push("lab/m", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"no answer of .* this machine reaches http://127"):
            check_push("lab/m", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it, or leave --push out"):
        check_push("lab/m", tmp_path)
    assert not hub

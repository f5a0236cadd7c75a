"""A model is a directory or a Hub id; tried against a small Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.contracts.models.driver import small_model
from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.models.hub import resolve_model_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "some-org/some-model"


class Hub(ThreadingHTTPServer):
    """Serves the files of one directory as `MODEL`: what a snapshot needs of the Hub's API."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.fetched: list[str] = []
        self.refuse: tuple[int, str] | None = None
        """Status and error code that every request is answered with."""
        self.withheld = "nothing"
        """A file that is listed, but answered with 404."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        files = sorted(file.name for file in self.server.directory.iterdir())
        if self.server.refuse:
            status, code = self.server.refuse
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "refused"})
        elif path == f"/api/models/{MODEL}/revision/main":
            siblings = [{"rfilename": name} for name in files]
            self._send_json({"id": MODEL, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/api/models/{MODEL}/tree/"):
            self._send_json(
                [
                    {
                        "type": "file",
                        "path": name,
                        "oid": hashlib.sha1(name.encode()).hexdigest(),
                        "size": (self.server.directory / name).stat().st_size,
                    }
                    for name in files
                ]
            )
        elif path.endswith(f"/{self.server.withheld}"):
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"/{MODEL}/resolve/{COMMIT}/"):
            name = path.rsplit("/", 1)[1]
            if self.command == "GET":
                self.server.fetched.append(name)
            etag = hashlib.sha1(name.encode()).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            self._send(200, (self.server.directory / name).read_bytes(), headers)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    served = small_model(tmp_path / "served")
    for extra in ("README.md", "pytorch_model.bin", "tokenizer.json", "chat_template.jinja"):
        (served / extra).write_text("{}")
    with Hub(served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()
        thread.join()


def refused(model: str, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model_dir(model)
    for word in (model, *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


class TestDirectory:
    def test_is_used_as_it_is(self, tmp_path: Path) -> None:
        assert resolve_model_dir(str(tmp_path)) == tmp_path

    def test_that_looks_like_a_hub_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / MODEL).mkdir(parents=True)
        assert resolve_model_dir(MODEL) == Path(MODEL)

    def test_in_the_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert resolve_model_dir("~/model") == tmp_path / "model"

    @pytest.mark.parametrize(
        "model",
        ["nowhere", "/no/where", "./a/b", "a/b/c", "../a", "org/", "", "a b/c", "~/no/where"],
    )
    def test_that_is_missing(self, model: str) -> None:
        refused(model, "no such model directory", "Hub id such as Qwen/Qwen3-0.6B")

    def test_that_is_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.touch()
        refused(str(path), "is a file")


class TestHub:
    def test_a_model_is_fetched_and_loads(self, hub: Hub) -> None:
        model_dir = resolve_model_dir(MODEL)
        assert load_config(model_dir).vocab_size == 101
        assert Checkpoint(model_dir).names()

    def test_only_what_is_read_is_fetched(self, hub: Hub) -> None:
        model_dir = resolve_model_dir(MODEL)
        expected = [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert sorted(hub.fetched) == expected
        assert sorted(path.name for path in model_dir.iterdir()) == expected

    def test_it_is_fetched_once(self, hub: Hub) -> None:
        first = resolve_model_dir(MODEL)
        hub.fetched.clear()
        assert resolve_model_dir(MODEL) == first
        assert hub.fetched == []

    def test_the_cache_serves_while_the_hub_is_away(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = resolve_model_dir(MODEL)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert resolve_model_dir(MODEL) == first

    def test_an_unknown_model(self, hub: Hub) -> None:
        refused("some-org/other", hub.url, "neither a directory here nor a model", "HF_TOKEN")

    def test_a_gated_model(self, hub: Hub) -> None:
        hub.refuse = (403, "GatedRepo")
        refused(MODEL, hub.url, "terms", "HF_TOKEN")

    def test_offline(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        refused(MODEL, hub.url, "not in the local cache")

    def test_nobody_listens(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        refused(MODEL, "http://127.0.0.1:9", "not in the local cache")

    def test_a_hub_in_trouble(self, hub: Hub) -> None:
        hub.refuse = (500, "")
        refused(MODEL, hub.url)

    def test_a_file_that_the_hub_lists_but_does_not_give(self, hub: Hub) -> None:
        hub.withheld = "model.safetensors"
        refused(MODEL, hub.url, "failed")

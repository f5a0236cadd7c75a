"""llama.cpp: a `llama-server` of its own, asked for all rows at once on the loopback interface.

    python benchmarks/peers/llamacpp_engine.py MODEL_DIR --gguf FILE --server BINARY --workload D8

The model directory tells only the size of the vocabulary.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import harness
from workloads import Request


class LlamacppPeer(harness.Peer):
    name = "llamacpp"
    description = "llama.cpp's server with one slot a row."

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--gguf", type=Path, required=True, help="the converted model")
        parser.add_argument("--server", default="llama-server", help="the binary")
        parser.add_argument("--slots", type=int, default=64, help="rows side by side")
        parser.add_argument("--slot-tokens", type=int, default=640, help="prompt and answer")
        parser.add_argument("--start-timeout", type=float, default=300, help="seconds")

    def __init__(self, model: Path, options: Namespace) -> None:
        self.binary, self.slots = options.server, options.slots
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.server = subprocess.Popen(
            [
                options.server, "-m", str(options.gguf), "--host", "127.0.0.1",
                "--port", str(port), "-t", str(options.threads), "-tb", str(options.threads),
                "-np", str(options.slots), "-c", str(options.slots * options.slot_tokens),
                "--no-webui", "--cache-ram", "0",
            ]
        )  # fmt: skip
        atexit.register(self._close)
        self._wait_until_ready(time.monotonic() + options.start_timeout)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self.server.poll()) is not None:
                raise SystemExit(f"{self.binary} ended with {code}")
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # not listening yet, or still loading (503)
                time.sleep(0.05)
        raise SystemExit(f"{self.binary} was not ready in time")

    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        with ThreadPoolExecutor(max_workers=len(requests)) as threads:
            return list(threads.map(self._complete, requests))

    def _complete(self, request: Request) -> list[int]:
        body = {
            "prompt": request.prompt,
            "n_predict": request.new_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        http = HttpRequest(
            f"{self.url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(http, timeout=3600) as answer:
            result: dict[str, Any] = json.load(answer)
        tokens: list[int] = result["tokens"]
        return tokens

    def versions(self) -> dict[str, str]:
        done = subprocess.run([self.binary, "--version"], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        return {"llama.cpp": next((line for line in lines if "version" in line), "unknown")}

    def _close(self) -> None:
        self.server.terminate()
        self.server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    harness.main(LlamacppPeer)

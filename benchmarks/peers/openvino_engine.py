"""OpenVINO GenAI's continuous batching on the CPU, with a model that optimum-intel exported.

    python benchmarks/peers/openvino_engine.py MODEL_DIR --export EXPORTED_DIR --workload D8

The model directory tells only the size of the vocabulary.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from workloads import Request


class OpenvinoPeer(harness.Peer):
    name = "openvino"
    description = "OpenVINO GenAI's ContinuousBatchingPipeline on the CPU."

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--export", type=Path, required=True, help="the directory of the exported model"
        )
        parser.add_argument("--precision", default="bf16", help="of the arithmetic")
        parser.add_argument("--kv-gb", type=int, default=5, help="the most that the KV cache takes")
        parser.add_argument("--max-rows", type=int, default=256)
        parser.add_argument("--max-step-tokens", type=int, help="the engine's own, where not given")

    def __init__(self, model: Path, options: Namespace) -> None:
        self.numpy: Any = importlib.import_module("numpy")
        self.openvino: Any = importlib.import_module("openvino")
        self.genai: Any = importlib.import_module("openvino_genai")
        self.export: Path = options.export
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = options.kv_gb
        scheduler.max_num_seqs = options.max_rows
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        if options.max_step_tokens is not None:
            scheduler.max_num_batched_tokens = options.max_step_tokens
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": options.precision,
        }
        self.pipeline: Any = self.genai.ContinuousBatchingPipeline(
            str(self.export), scheduler, "CPU", properties
        )

    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        prompts = [
            self.openvino.Tensor(self.numpy.array([request.prompt], dtype=self.numpy.int64))
            for request in requests
        ]
        results = self.pipeline.generate(prompts, [self._generation(r) for r in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    def _generation(self, request: Request) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = request.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config

    def weight_bytes(self) -> int | None:
        """Of the file: f16 is as wide as bf16, and what the engine turns it into."""
        return (self.export / "openvino_model.bin").stat().st_size

    def versions(self) -> dict[str, str]:
        return {
            "openvino_genai": self.genai.__version__,
            "openvino": self.openvino.__version__,
        }


if __name__ == "__main__":
    harness.main(OpenvinoPeer)

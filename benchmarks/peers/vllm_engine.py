"""vLLM on the CPU, by its offline class `LLM`.

    LD_PRELOAD=… python benchmarks/peers/vllm_engine.py MODEL_DIR --workload D8 --repeats 2

What to preload stands in the README beside this file; `compare.py` does so by itself.
"""

from __future__ import annotations

import importlib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from workloads import Request


class VllmPeer(harness.Peer):
    name = "vllm"
    description = "vLLM's offline class on the CPU, compiled unless --eager."

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--dtype", default="bfloat16")
        parser.add_argument("--eager", action="store_true", help="without torch.compile")
        parser.add_argument("--kv-gib", type=int, default=4, help="size of the KV cache")
        parser.add_argument("--max-model-len", type=int, default=4096)
        parser.add_argument("--max-rows", type=int, help="max_num_seqs")
        parser.add_argument("--max-step-tokens", type=int, help="max_num_batched_tokens")

    def __init__(self, model: Path, options: Namespace) -> None:
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }.items():
            os.environ.setdefault(name, value)
        # vLLM reads these while it is imported.
        self.vllm: Any = importlib.import_module("vllm")
        sizes = {
            "max_num_seqs": options.max_rows,
            "max_num_batched_tokens": options.max_step_tokens,
        }
        self.llm: Any = self.vllm.LLM(
            model=str(model),
            dtype=options.dtype,
            enforce_eager=options.eager,
            enable_prefix_caching=False,
            max_model_len=options.max_model_len,
            skip_tokenizer_init=True,
            seed=0,
            **{name: size for name, size in sizes.items() if size is not None},
        )

    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        sampling = [
            self.vllm.SamplingParams(
                temperature=0, max_tokens=request.new_tokens, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def versions(self) -> dict[str, str]:
        torch: Any = importlib.import_module("torch")
        return {"vllm": self.vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    harness.main(VllmPeer)

"""A model small enough for every test that needs real kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.make_checkpoint import published_config, random_tensor, tensor_shapes, write_checkpoint


def write_tiny_model(directory: Path) -> Path:
    """A seeded random model of the smallest shape, without a tokenizer.

    Its weights are larger than a fresh model's, so that its logits are far apart and depend on
    the whole context: a wrong page or position changes its tokens.
    """
    config = published_config("tiny")
    tensors = {
        name: random_tensor(name, shape, 0, torch.float32) * (1 if "norm" in name else 12)
        for name, shape in tensor_shapes(config).items()
    }
    return write_checkpoint(directory, config, tensors=tensors)

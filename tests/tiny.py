"""Models small enough for every test that needs real kernels."""

from __future__ import annotations

from pathlib import Path

import torch

import tidemill_worker
from tools.make_checkpoint import published_config, random_tensor, tensor_shapes, write_checkpoint

DEMO = Path(tidemill_worker.__file__).parent / "demo_model"


def write_tiny_model(directory: Path, chat_template: str | None = None) -> Path:
    """A seeded random model of the smallest shape, with the demo model's tokenizer where a chat
    template is given, and without one otherwise.

    Its weights are larger than a fresh model's, so that its logits are far apart and depend on
    the whole context: a wrong page or position changes its tokens.
    """
    config = published_config("tiny")
    tensors = {
        name: random_tensor(name, shape, 0, torch.float32) * (1 if "norm" in name else 12)
        for name, shape in tensor_shapes(config).items()
    }
    tokenizer = None if chat_template is None else DEMO / "tokenizer.json"
    write_checkpoint(directory, config, tensors=tensors, tokenizer=tokenizer)
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, "utf-8")
    return directory


def write_demo_model(directory: Path, chat_template: str) -> Path:
    """The demo model with another chat template."""
    directory.mkdir()
    for file in DEMO.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(chat_template, "utf-8")
    return directory

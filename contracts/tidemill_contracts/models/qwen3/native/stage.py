"""A stage that is one call of the C++ library."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.errors import BackendError
from tidemill_contracts.models.qwen3.native.library import (
    SCALES,
    TENSORS,
    BatchArgs,
    Library,
    ModelArgs,
)


class NativeStage:
    """`CompiledStage` of a dense model: takes the stage's arguments as `abi` declares them."""

    decodes_along = True
    """The library knows no decode: a row of one token is one wherever it stands."""

    def __init__(self, library: Library, specs: Sequence[TensorArgSpec]) -> None:
        self._library = library
        self._names = [spec.name for spec in specs]
        self._model: ModelArgs | None = None
        self._held: list[Tensor] = []

    def __call__(self, *args: Tensor) -> None:
        """Raises `BackendError` where a token, a page or a place lies outside the model."""
        named = dict(zip(self._names, args, strict=True))
        rows = len(named["seq_lens"])
        lens, offsets = named.get("chunk_lens"), named.get("chunk_offsets")
        if lens is None or offsets is None:
            offsets = torch.arange(rows, dtype=torch.int32)
            lens = torch.ones_like(offsets)
        outputs = named.get("logit_rows")
        if outputs is None:
            outputs = offsets + lens - 1
        tensors = {
            "ids": named["input_ids"],
            "slots": named["slot_mapping"],
            "seq_lens": named["seq_lens"],
            "lens": lens,
            "offsets": offsets,
            "table": named["block_table"],
            "output_tokens": outputs,
            "logits": named["logits"],
        }
        batch = BatchArgs(
            tokens=len(named["input_ids"]),
            rows=rows,
            table_width=named["block_table"].shape[1],
            outputs=len(outputs),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        # The engine's thread decides how many there are, so they are asked for when it calls.
        engine = self._library.engine(torch.get_num_threads())
        if not self._library.step(engine, self._model_args(named), batch):
            raise BackendError("The step names a token, a page or a place that the model has not")

    def _model_args(self, named: Mapping[str, Tensor]) -> ModelArgs:
        """Made once for the same weights and cache, which are held so that they stay."""
        kept = [name for name in (*TENSORS, *SCALES) if name in named]
        tensors = [named[name] for name in kept]
        if self._model is None or any(map(operator.is_not, tensors, self._held)):
            layers, pages, page_size, kv_heads, head_dim = named["k_cache"].shape
            self._held = tensors
            self._model = ModelArgs(
                layers=layers,
                hidden=named["wo"].shape[1],
                q_heads=named["wo"].shape[2] // head_dim,
                kv_heads=kv_heads,
                head_dim=head_dim,
                inner=named["w_down"].shape[2],
                vocabulary=named["embed"].shape[0],
                page_size=page_size,
                pages=pages,
                places=named["rope_cos"].shape[0],
                eps=float(named["rms_norm_eps"]),
                **{name: named[name].data_ptr() for name in kept},
            )
        return self._model

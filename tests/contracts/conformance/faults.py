"""Faults of real kernels and contracts, each with the checks that must fail for it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.contracts.conformance.copies import copied, padded, patched
from tidemill_contracts.models.contract import CacheSpec, KVCache, ModelContract, RuntimeConfig


@dataclass(frozen=True)
class Fault:
    """How to make the faulty contract, and the names of checks that find it."""

    make: Callable[[], ModelContract]
    found_by: tuple[str, ...]


def _kernel(*changes: tuple[str, str], found_by: str) -> Fault:
    return Fault(lambda: copied(patched(*changes)), tuple(found_by.split()))


def _hook(found_by: str, **changes: Callable[..., Any]) -> Fault:
    return Fault(lambda: copied(**changes), tuple(found_by.split()))


def _stage(found_by: str, **changes: Callable[[Any], Any]) -> Fault:
    """`changes` of every stage's fields."""

    def make() -> ModelContract:
        contract = copied()
        kernels = {
            name: replace(
                kernel,
                **{field: change(getattr(kernel, field)) for field, change in changes.items()},
            )
            for name, kernel in contract.kernels.items()
        }
        return replace(contract, kernels=kernels)

    return Fault(make, tuple(found_by.split()))


def _swapped(build: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """cos for sin: two arguments of one shape."""

    def swapped(*parts: Any) -> tuple[Tensor, ...]:
        args = list(build(*parts))
        tables = [n for n, arg in enumerate(args) if arg is parts[1].rope_cos]
        at = tables[0]
        args[at], args[at + 1] = args[at + 1], args[at]
        return tuple(args)

    return swapped


def _kept(build: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The first call's tuple for every call of a shape."""
    seen: dict[torch.Size, tuple[Tensor, ...]] = {}
    return lambda inputs, *rest: seen.setdefault(inputs.input_ids.shape, build(inputs, *rest))


def _declared_in(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(replace(arg, direction="in") if arg.name == "v_cache" else arg for arg in args)


def _doubled_compile_dtype(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda config, runtime: (build(config, runtime)[0].long(), *build(config, runtime)[1:])


def _another_model(original: Any, loaded: Any, config: Any, runtime: RuntimeConfig) -> None:
    raise copied().mismatch("hidden_size", found=config.hidden_size, expected=5120)


def _used_memory(original: Any, config: Any, runtime: RuntimeConfig) -> CacheSpec:
    spec: CacheSpec = original(config, runtime)

    def allocate(pages: int) -> KVCache:
        cache = spec.allocate(pages)
        cache.v.flatten()[-1] = 0.5
        return cache

    return replace(spec, allocate=allocate)


def _announces_half(original: Any, config: Any, runtime: RuntimeConfig) -> CacheSpec:
    spec: CacheSpec = original(config, runtime)
    return replace(spec, bytes_per_page=spec.bytes_per_page // 2)


def _exports_twice(original: Any, source: Any, config: Any, runtime: Any, exporter: Any) -> Any:
    def twice(tensor: Tensor) -> Tensor:
        exporter(tensor)
        exported: Tensor = exporter(tensor)
        return exported

    return original(source, config, runtime, twice)


def _keeps_one_back(original: Any, source: Any, config: Any, runtime: Any, exporter: Any) -> Any:
    def export(tensor: Tensor) -> Tensor:
        exported: Tensor = tensor if tensor.numel() == 1 else exporter(tensor)
        return exported

    return original(source, config, runtime, export)


def _nan_padding() -> ModelContract:
    return padded(
        patched(
            ("eps), lm_head))", "eps), lm_head))\n    logits[:, 101:] = float('nan')"),
        )
    )


def _drifts() -> ModelContract:
    """Its limits say how often the kernels were loaded."""
    made: list[ModelContract] = []
    loads: list[None] = []

    def load(original: Any) -> Any:
        loads.append(None)
        object.__setattr__(made[0], "limits", {"loads": len(loads)})
        return original()

    made.append(copied(load_kernels=load))
    return made[0]


FAULTS: dict[str, Fault] = {
    "negative slots are written": _kernel(
        ("written = slot_mapping >= 0", "written = slot_mapping < 2**31 - 1"),
        found_by="negative-slots",
    ),
    "slots are off by one": _kernel(
        ("slot_mapping[written].long()", "slot_mapping[written].long() + 1"),
        found_by="slot-mapping reused-pages nan-in-page-tail",
    ),
    "a chunk's positions start at zero": _kernel(
        ("] = torch.arange(end - length, end)\n    cos", "] = torch.arange(length)\n    cos"),
        found_by="chunked-equals-whole reference-logits",
    ),
    "a later chunk's positions start at zero, those of decode do not": _kernel(
        (
            "= torch.arange(end - length, end)\n    cos",
            "= torch.arange(end - length, end) if length == 1 else torch.arange(length)\n    cos",
        ),
        found_by="absolute-positions chunked-equals-whole",
    ),
    "a token sees the one after it": _kernel(
        ("seen = places <=", "seen = places - 1 <="),
        found_by="chunked-equals-whole decode-equals-prefill reference-logits",
    ),
    "unused table entries are read": _kernel(
        ("places = torch.arange(end)", "places = torch.arange(len(table) * page_size)"),
        found_by="unused-table-entries nan-in-page-tail",
    ),
    "logits of a chunk's first token": _kernel(
        ("offset + length - 1 for", "offset for"), found_by="last-token-logits"
    ),
    "logits are told in the order of the tokens, not as asked": _kernel(
        ("asked = logit_rows.tolist()", "asked = sorted(logit_rows.tolist())"),
        found_by="prompt-logits",
    ),
    "logits are those of the token after": _kernel(
        (
            "asked = logit_rows.tolist()",
            "asked = [min(token + 1, len(input_ids) - 1) for token in logit_rows.tolist()]",
        ),
        found_by="prompt-logits",
    ),
    "K is stored before RoPE and turned when it is read": _kernel(
        (
            "k = rotate(rms_norm(k, k_norm[layer], eps), cos, sin)",
            "k = rms_norm(k, k_norm[layer], eps)",
        ),
        (
            "attend(q[own], k_pool[context],",
            "attend(q[own], rotate(k_pool[context], *(t[:end, None].to(k.dtype) for t in"
            " (rope_cos, rope_sin))),",
        ),
        found_by="stored-k",
    ),
    "K is stored before its norm, and never normed": _kernel(
        ("rotate(rms_norm(k, k_norm[layer], eps), cos, sin)", "rotate(k, cos, sin)"),
        found_by="stored-k reference-logits",
    ),
    "pages of 16 tokens": _kernel(
        (
            "page_size, kv_heads, head_dim = k_cache.shape[2:]",
            "kv_heads, head_dim = k_cache.shape[3:]\n    page_size = 16",
        ),
        found_by="page-size-independence",
    ),
    "the tail of the last page is read with no weight": _kernel(
        ("places = torch.arange(end)", "places = torch.arange(-(-end // page_size) * page_size)"),
        found_by="nan-in-page-tail",
    ),
    "V of a chunk's last token is not written": _kernel(
        ("v_pool[slots] = v[written]", "v_pool[slots[:-1]] = v[written][:-1]"),
        found_by="slot-mapping decode-equals-prefill",
    ),
    "K and V are added to what a page holds": _kernel(
        ("k_pool[slots] = k[written]", "k_pool.index_add_(0, slots, k[written])"),
        found_by="kv-rewrite-idempotent reused-pages",
    ),
    "rows that write one slot add up": _kernel(
        (
            "k_pool[slots] = k[written]",
            "k_pool[slots] = 0\n        k_pool.index_add_(0, slots, k[written])",
        ),
        found_by="padding-rows",
    ),
    "rows are told apart by their first page": _kernel(
        (
            "table = block_table[row]",
            "table = {int(t[0]): t for t in block_table}[int(block_table[row, 0])]",
        ),
        found_by="shared-pages",
    ),
    "every row is as long as the longest": _kernel(
        ("(row, 1, length) for row, length", "(row, 1, max(lengths)) for row, length"),
        found_by="batch-equals-alone",
    ),
    "decode does not see its own token": _kernel(
        (
            "seen = places <= torch.arange(end - length, end)[:, None]",
            "seen = places <= torch.arange(end - length, end)[:, None] - int(length == 1 < end)",
        ),
        found_by="decode-equals-prefill",
    ),
    "chunk_offsets is ignored": _kernel(
        (
            "offsets = chunk_offsets.tolist()",
            "offsets = (chunk_lens.cumsum(0) - chunk_lens).tolist()",
        ),
        found_by="chunk-offsets",
    ),
    "six rows are attended": _kernel(
        ("in enumerate(spans):\n            table", "in enumerate(spans[:6]):\n            table"),
        found_by="largest-step",
    ),
    "all logits are zero": _kernel(
        (
            "logits.copy_(functional.linear(rms_norm(hidden[told], final_norm, eps), lm_head))",
            "logits.zero_()",
        ),
        found_by="logits-written reference-logits",
    ),
    "every row gets the logits of the first": _kernel(
        ("logits.copy_(functional", "logits[:] = (functional"),
        ("eps), lm_head))", "eps), lm_head))[:1]"),
        found_by="logits-written batch-equals-alone",
    ),
    "the last logit is not written": _kernel(
        (
            "logits.copy_(functional.linear(rms_norm(hidden[told], final_norm, eps), lm_head))",
            "logits[:, :-1] = functional.linear(rms_norm(hidden[told], final_norm, eps),"
            " lm_head)[:, :-1]",
        ),
        found_by="logits-written",
    ),
    "lengths are changed in place": _kernel(
        ("lengths = seq_lens.tolist()", "lengths = seq_lens.tolist()\n    seq_lens.sub_(1)"),
        found_by="inputs-not-written",
    ),
    "pad logits are NaN": Fault(_nan_padding, ("pad-vocabulary",)),
    "a kernel takes an argument more": _kernel(
        (
            "    rms_norm_eps: Tensor,\n    logits: Tensor,\n) -> None:\n    lengths",
            "    rms_norm_eps: Tensor,\n    logits: Tensor,\n    extra: Tensor,\n) -> None:"
            "\n    lengths",
        ),
        found_by="arity start-up",
    ),
    "weights are exported twice": _hook("weights-exported-once", prepare_weights=_exports_twice),
    "a weight is not exported": _hook("weights-exported-once", prepare_weights=_keeps_one_back),
    "half the weights are announced": _hook(
        "weight-bytes", weight_bytes=lambda original, *args: original(*args) // 2
    ),
    "half a page is announced": _hook("cache-size", cache_spec=_announces_half),
    "a page is not zeroed": _hook("zeroed-pages", cache_spec=_used_memory),
    "the model is refused": _hook("start-up", validate_kernels=_another_model),
    "cos is passed for sin": _stage("builder-order", runtime_args_builder=_swapped),
    "the first call's arguments are passed again": _stage(
        "builder-order", runtime_args_builder=_kept
    ),
    "V is written but declared an input": _stage("inputs-not-written", args=_declared_in),
    "compile arguments of another dtype": _stage(
        "arg-specs", compile_args_builder=_doubled_compile_dtype
    ),
    "limits change when the kernels are loaded": Fault(_drifts, ("fingerprint-stability",)),
}

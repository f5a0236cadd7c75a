"""What a contract is tested with: a model small enough to run anywhere, and how it runs.

A contract of the Qwen3 family needs no case of its own: `qwen3_case` makes the smallest model that
its limits allow. Any other brings a `ConformanceCase`.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import math
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tidemill_contracts.models import registry, startup
from tidemill_contracts.models.checkpoint import SINGLE_FILE, Checkpoint
from tidemill_contracts.models.config import ModelConfig, load_config
from tidemill_contracts.models.contract import ModelContract, RuntimeConfig, WeightSource
from tidemill_contracts.models.errors import CheckpointError, ModelError
from tidemill_contracts.models.runtime import DEFAULT_PAGE_SIZE

MAX_ROWS = 8
"""Rows in one step, where the contract's limits allow as many."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""By how much two ways to compute the same logits may differ, as a share of the logits' standard
deviation. Measured at worst over twelve seeds of `qwen3_case`: 3e-6 in float32; in bfloat16, which
keeps 8 bits, 0.05 between two orders of summation and 0.13 against float32. Most faults move
logits by more than one."""

ROUTED_TOLERANCE = 2.5
"""In place of that of bfloat16 where tokens are sent to experts: a rounding may send one to another
expert, so only gross faults show (1.9 at worst over twelve seeds). float32 shows the others."""


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """A model to test a contract with."""

    config: ModelConfig
    weights: Callable[[], WeightSource]
    """Opens the same checkpoint each time that the model is loaded."""
    reference: ModelContract | None = None
    """Serves the same model rightly: run in float32 on the CPU, and compared with. May be the
    contract under test, which is then held to itself on other devices and in other dtypes."""
    tolerance: float | None = None
    """In place of `TOLERANCES`: a share of the logits' standard deviation."""

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """A share of the logits' standard deviation."""
        if self.tolerance is not None:
            return self.tolerance
        if self.config.num_experts and dtype is not torch.float32:
            return ROUTED_TOLERANCE
        return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


@dataclass(frozen=True, slots=True)
class ConformanceOptions:
    """How the model runs; ``None`` leaves the choice to the contract."""

    device: str = "cpu"
    dtype: torch.dtype | None = None
    """float32 where the contract accepts it, else bfloat16."""
    page_size: int | None = None
    """The only one that the contract's limits allow, else 16."""
    deterministic: bool = False


def plan_run(
    contract: ModelContract, case: ConformanceCase, options: ConformanceOptions
) -> RuntimeConfig:
    """A run small enough to be quick, and large enough that rows span several pages."""
    limits = contract.limits
    page_size = options.page_size or limits.get("page_size", DEFAULT_PAGE_SIZE)
    longest = min(limits.get("max_seq", math.inf), case.config.max_position_embeddings)
    runtime = RuntimeConfig(
        device=torch.device(options.device),
        dtype=options.dtype or torch.float32,
        max_batch_size=min(limits.get("max_rows", MAX_ROWS), MAX_ROWS),
        max_seq_len=int(min(longest, max(64, 4 * page_size))),
        max_step_tokens=0,
        page_size=0,
        total_kv_pages=0,
        deterministic=options.deterministic,
    )
    runtime = with_page_size(contract, runtime, page_size)
    if options.dtype is None and _refuses_dtype(contract, case.config, runtime):
        return dataclasses.replace(runtime, dtype=torch.bfloat16)
    return runtime


def with_page_size(
    contract: ModelContract, runtime: RuntimeConfig, page_size: int
) -> RuntimeConfig:
    """The same run on pages of another size: all rows fit at full length, with a page to spare."""
    pages = runtime.max_batch_size * -(-runtime.max_seq_len // page_size) + 1
    tokens = runtime.max_batch_size * runtime.max_seq_len
    return dataclasses.replace(
        runtime,
        max_step_tokens=tokens,
        max_logit_rows=tokens,
        page_size=page_size,
        total_kv_pages=max(pages, contract.limits.get("min_kv_pages", 1)),
    )


def _refuses_dtype(contract: ModelContract, config: ModelConfig, runtime: RuntimeConfig) -> bool:
    return any(problem.field == "dtype" for problem in startup.problems(contract, config, runtime))


class SeededWeights:
    """A checkpoint of noise in memory: `WeightSource` over named shapes.

    The same seed gives the same weights; each tensor is made when it is taken. Projections keep
    the size of what they are given and norms lie around one, so that such a model is no
    near-constant and a fault anywhere in it moves its logits.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        self.shapes = dict(shapes)
        self._left = dict(shapes)
        self._seed = seed

    def names(self) -> list[str]:
        """The tensors that have not been taken yet."""
        return list(self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, float32. Raises `CheckpointError` where it is missing, was taken before, or
        has another shape."""
        found = self._left.pop(name, None)
        if found is None:
            raise CheckpointError(f"tensor {name} is missing, or was taken already.")
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}, asked for {list(shape)}."
            )
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    def finish(self) -> None:
        """Raises `CheckpointError` where tensors are left over."""
        if self._left:
            raise CheckpointError(f"tensors were not taken: {', '.join(sorted(self._left))}.")


def qwen3_case(contract: ModelContract, **sizes: int) -> ConformanceCase:
    """The smallest Qwen3 model that the contract's limits allow, held to the contract in the tree.
    A mixture of experts where the contract serves those.

    `sizes` are fields of its ``config.json``, for kernels built for one shape that their limits do
    not tell in full.

    Its weights are written to a directory that lives as long as the process: a backend in another
    process reads them there.
    """
    limits = contract.limits
    shape = {
        "vocab_size": limits.get("real_vocab", limits.get("vocab", 101)),
        "hidden_size": limits.get("hidden_size", 32),
        "intermediate_size": limits.get("intermediate_size", 48),
        "num_hidden_layers": limits.get("num_layers", 2),
        "num_attention_heads": limits.get("num_attention_heads", 4),
        "num_key_value_heads": limits.get("num_key_value_heads", 2),
        "head_dim": limits.get("head_dim", 16),
        "max_position_embeddings": limits.get("max_seq", 1024),
    }
    kind: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if _serves_experts(contract):
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": limits.get("num_experts", 4),
            "num_experts_per_tok": limits.get("num_experts_per_tok", 2),
            "moe_intermediate_size": limits.get("moe_intermediate_size", 24),
            "norm_topk_prob": True,
        }
    config = ModelConfig.from_hf(
        {
            **kind,
            **shape,
            **sizes,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "a seeded Qwen3 model",
    )
    directory = cache(lambda: _save(SeededWeights(qwen3_shapes(config))))
    return ConformanceCase(config, lambda: Checkpoint(directory()), _in_tree(config))


def _serves_experts(contract: ModelContract) -> bool:
    model = contract.model
    return any(
        "qwen3_moe" in entry.model_types
        for entry in registry.registrations()
        if (entry.family, entry.variant) == (model.family, model.variant)
    )


def _save(weights: SeededWeights) -> Path:
    """A directory with the tensors in bfloat16, which every dtype holds exactly."""
    directory = Path(tempfile.mkdtemp(prefix="tidemill-conformance-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tensors = {name: weights.take(name, shape).bfloat16() for name, shape in weights.shapes.items()}
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def directory_case(model_dir: Path) -> ConformanceCase:
    """The model of a directory, held to the contract in the tree where that serves it too.

    Raises `CheckpointError`.
    """
    config = load_config(model_dir)
    return ConformanceCase(config, lambda: Checkpoint(model_dir), _in_tree(config))


def named_case(contract: ModelContract, name: str) -> ConformanceCase:
    """The case that ``module:attribute`` names: a `ConformanceCase`, or a function that makes one
    for a contract. Raises `ModelError`."""
    module, _, attribute = name.partition(":")
    try:
        found = pkgutil.resolve_name(f"{module}:{attribute or 'CASE'}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"There is no case {name!r} (module:attribute): {error}.") from error
    case = found if isinstance(found, ConformanceCase) else found(contract)
    if not isinstance(case, ConformanceCase):
        raise ModelError(f"{name} gives a {type(case).__name__}, not a ConformanceCase.")
    return case


def _in_tree(config: ModelConfig) -> ModelContract | None:
    """The contract in the tree that serves any model of this kind."""
    variant = {"qwen3": "dense", "qwen3_moe": "moe"}.get(config.model_type)
    return None if variant is None else registry.get_contract("qwen3", variant)


def qwen3_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of an untied Qwen3 checkpoint, in Hugging Face's names."""
    hidden, head = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        **_feed_forward_shapes(config),
    }
    return {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        **{
            f"model.layers.{number}.{name}.weight": shape
            for number in range(config.num_hidden_layers)
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }


def _feed_forward_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size

    def gated(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}.gate_proj": (inner, hidden),
            f"{name}.up_proj": (inner, hidden),
            f"{name}.down_proj": (hidden, inner),
        }

    if not config.num_experts:
        return gated("mlp", config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (config.num_experts, hidden)}
    for expert in range(config.num_experts):
        shapes |= gated(f"mlp.experts.{expert}", config.moe_intermediate_size)
    return shapes

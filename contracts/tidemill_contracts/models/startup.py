"""From a contract and a model directory to stages that can be called, or to one clear error.

The order is fixed, and everything that can be told without loading is told first:

    schema → requirements → stages → limits → kernels → fingerprint logged → compile
    → weights → KV cache → (warm-up, by the caller)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tidemill_contracts.models.args import DTYPES, MODEL_DTYPE, ArgChecker
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CompiledStage,
    KernelSpec,
    KVCache,
    LoadedKernelModules,
    ModelContract,
    Phase,
    RuntimeConfig,
    StageInputs,
    StaticArgs,
    TensorExporter,
    WeightSource,
)
from tidemill_contracts.models.requirements import SERVING_REQUIREMENTS, ServingRequirements

logger = logging.getLogger("tidemill.contract")

_EQUAL_LIMITS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
)
"""Limits that are sizes of the one model that the kernels were built for."""


class BoundStage:
    """One stage of a loaded model: takes logical inputs, checks the argument tuple, runs."""

    def __init__(
        self,
        kernel: KernelSpec,
        compiled: CompiledStage,
        checker: ArgChecker,
        static: StaticArgs,
        cache: KVCache,
    ) -> None:
        self.public_name = kernel.public_name
        self._build = kernel.runtime_args_builder
        self._compiled = compiled
        self._checker = checker
        self._static = static
        self._cache = cache
        self._sources_checked = False

    def __call__(self, inputs: StageInputs) -> None:
        """Runs the stage; the logits are in ``inputs.logits``.

        Raises `ContractMismatch` where the contract's builder made a tuple that does not fit the
        stage, before its kernel runs.
        """
        args = self._build(inputs, self._static, self._cache)
        self._checker.check(args)
        if not self._sources_checked:
            self._checker.check_sources(args, self._sources(inputs))
            self._sources_checked = True
        self._compiled(*args)

    def _sources(self, inputs: StageInputs) -> Mapping[str, Tensor]:
        sources = {name: tensor for name, tensor in inputs.named().items() if tensor is not None}
        return {
            **sources,
            **self._static.named(),
            "k_cache": self._cache.k,
            "v_cache": self._cache.v,
        }


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to run."""

    contract: ModelContract
    config: ModelConfig
    runtime: RuntimeConfig
    static: StaticArgs
    cache: KVCache
    stages: Mapping[Phase, BoundStage]


def load_model(
    contract: ModelContract,
    config: ModelConfig,
    runtime: RuntimeConfig,
    source: Callable[[], WeightSource],
    *,
    exporter: TensorExporter = lambda tensor: tensor,
    requirements: ServingRequirements = SERVING_REQUIREMENTS,
) -> ServedModel:
    """Takes a contract through every check, then loads the model.

    `source` opens the checkpoint; it is called once nothing else can fail. Raises
    `ContractMismatch` for the first thing that does not fit, `CheckpointError` for the weights.
    """
    loaded = check(contract, config, runtime, requirements)
    contract.hooks.bind(loaded)
    compiled: dict[Phase, tuple[KernelSpec, CompiledStage, ArgChecker]] = {}
    for phase in requirements.required_phases:
        kernel = contract.stage(phase)
        args = kernel.compile_args_builder(config, runtime)
        checker = ArgChecker(
            contract.identity,
            kernel.public_name,
            kernel.args,
            kernel.dynamic_symbols,
            args,
            runtime.dtype,
        )
        compiled[phase] = (kernel, kernel.host_jit_fn.compile(*args, config=runtime), checker)
        logger.debug("compiled %s", kernel.public_name)
    static = contract.hooks.prepare_weights(source(), config, runtime, exporter)
    cache = contract.hooks.cache_spec(config, runtime).allocate(runtime.total_kv_pages)
    stages = {
        phase: BoundStage(kernel, run, checker, static, cache)
        for phase, (kernel, run, checker) in compiled.items()
    }
    return ServedModel(contract, config, runtime, static, cache, stages)


def check(
    contract: ModelContract,
    config: ModelConfig,
    runtime: RuntimeConfig,
    requirements: ServingRequirements = SERVING_REQUIREMENTS,
) -> LoadedKernelModules:
    """Everything that can be told before anything is compiled; returns the loaded kernels.

    Raises `ContractMismatch`.
    """
    requirements.check(contract)
    check_stages(contract)
    check_limits(contract, config, runtime)
    loaded = contract.hooks.load_kernels()
    check_kernels(contract, loaded)
    contract.hooks.validate_kernels(loaded, config, runtime)
    found = sorted(requirements.found_optional(contract))
    logger.info(
        "contract %s %s%s",
        contract.model,
        contract.abi_fingerprint(),
        f", optional {', '.join(found)}" if found else "",
    )
    return loaded


def check_stages(contract: ModelContract) -> None:
    """Raises `ContractMismatch` where a stage's description contradicts itself."""
    public_names: dict[str, str] = {}
    for key, kernel in contract.kernels.items():
        where = f"kernels[{key}]"
        if kernel.name != key:
            raise contract.mismatch(f"{where}.name", found=kernel.name, expected=key)
        other = public_names.setdefault(kernel.public_name, key)
        if other != key:
            raise contract.mismatch(
                f"{where}.public_name",
                found=f"{kernel.public_name!r}, as in kernels[{other}]",
                expected="a name of its own",
                hint="Compiled artefacts are filed under it.",
            )
        names = [arg.name for arg in kernel.args]
        for name in names:
            if names.count(name) > 1:
                raise contract.mismatch(
                    f"{where}.args", found=f"{name!r} twice", expected="each name once"
                )
        for arg in kernel.args:
            if arg.dtype not in DTYPES and arg.dtype != MODEL_DTYPE:
                raise contract.mismatch(
                    f"{kernel.public_name}.{arg.name} dtype",
                    found=arg.dtype,
                    expected=f"one of {', '.join([*DTYPES, MODEL_DTYPE])}",
                )
            if arg.direction not in ("in", "out", "inout"):
                raise contract.mismatch(
                    f"{kernel.public_name}.{arg.name} direction",
                    found=arg.direction,
                    expected="in, out or inout",
                )
        if all(arg.direction == "in" for arg in kernel.args):
            raise contract.mismatch(
                f"{where}.args", found="no output", expected="an argument that is out or inout"
            )


def check_limits(contract: ModelContract, config: ModelConfig, runtime: RuntimeConfig) -> None:
    """Raises `ContractMismatch` where the model or the run lies outside the contract's limits.

    Limits that are not known here are the contract's own business (`validate_kernels`).
    """
    limits = contract.limits

    def refuse(limit: str, found: object, expected: object, hint: str) -> None:
        raise contract.mismatch(f"limits[{limit}]", found=found, expected=expected, hint=hint)

    sizes = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
    }
    for name in _EQUAL_LIMITS:
        if name in limits and sizes[name] != limits[name]:
            refuse(name, sizes[name], limits[name], "The kernels were built for another model.")
    if "real_vocab" in limits and config.vocab_size != limits["real_vocab"]:
        hint = "The kernels were built for another vocabulary."
        refuse("real_vocab", config.vocab_size, limits["real_vocab"], hint)
    if "vocab" in limits and contract.hooks.logits_width(config) != limits["vocab"]:
        hint = "Logits and head must have the padded vocabulary's width."
        refuse("vocab", contract.hooks.logits_width(config), limits["vocab"], hint)
    if "max_seq" in limits and runtime.max_seq_len > limits["max_seq"]:
        hint = f"Start the worker with --max-model-len {limits['max_seq']} or less."
        refuse("max_seq", runtime.max_seq_len, f"at most {limits['max_seq']}", hint)
    if "page_size" in limits and runtime.page_size != limits["page_size"]:
        hint = f"Start the worker with --page-size {limits['page_size']}."
        refuse("page_size", runtime.page_size, limits["page_size"], hint)
    if "min_kv_pages" in limits and runtime.total_kv_pages < limits["min_kv_pages"]:
        hint = f"Start the worker with --kv-pages {limits['min_kv_pages']} or more."
        refuse("min_kv_pages", runtime.total_kv_pages, f"at least {limits['min_kv_pages']}", hint)
    if "max_rows" in limits and runtime.max_batch_size > limits["max_rows"]:
        hint = f"Start the worker with --max-rows {limits['max_rows']} or less."
        refuse("max_rows", runtime.max_batch_size, f"at most {limits['max_rows']}", hint)


def check_kernels(contract: ModelContract, loaded: LoadedKernelModules) -> None:
    """Raises `ContractMismatch` where a kernel's parameters are not its stage's arguments."""
    for key, kernel in contract.kernels.items():
        function = loaded.functions.get(key)
        if function is None:
            raise contract.mismatch(
                f"kernels[{key}]",
                found=f"functions {sorted(loaded.functions)}",
                expected=f"a function {key!r}",
                hint="The kernels and this contract come from different versions.",
            )
        parameters = list(inspect.signature(function).parameters)
        declared = [arg.name for arg in kernel.args]
        if len(parameters) != len(declared):
            raise contract.mismatch(
                f"{kernel.public_name} arity",
                found=f"a kernel of {len(parameters)} parameters",
                expected=f"{len(declared)} declared arguments",
                hint=_difference(parameters, declared),
            )
        for position, (parameter, name) in enumerate(zip(parameters, declared, strict=True)):
            if parameter != name:
                raise contract.mismatch(
                    f"{kernel.public_name} argument {position}",
                    found=f"the kernel's {parameter!r}",
                    expected=f"the declared {name!r}",
                    hint=_difference(parameters, declared),
                )


def _difference(parameters: list[str], declared: list[str]) -> str:
    only_kernel = [name for name in parameters if name not in declared]
    only_contract = [name for name in declared if name not in parameters]
    said = []
    if only_kernel:
        said.append(f"only the kernel has {', '.join(only_kernel)}")
    if only_contract:
        said.append(f"only the contract declares {', '.join(only_contract)}")
    what = "; ".join(said) or "the order differs"
    return f"{what[0].upper()}{what[1:]}: contract and kernels come from different versions."

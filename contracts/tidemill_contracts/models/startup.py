"""From a contract and a model directory to stages that can be called, or to one clear error.

The order is fixed, and everything that can be told without loading is told first:

    schema → requirements → stages → limits → kernels → fingerprint logged → compile
    → weights → KV cache → (warm-up, by the caller)
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
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
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.requirements import SERVING_REQUIREMENTS, ServingRequirements
from tidemill_contracts.models.sampling import SamplingKernels

logger = logging.getLogger("tidemill.contract")


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
        self.decodes_along = bool(getattr(compiled, "decodes_along", False))
        """See `CompiledStage`."""
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
    sampling_kernels: SamplingKernels | None = None


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
    for phase in requirements.phases(contract):
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
    offered = getattr(contract.hooks, "sampling_kernels", None)
    sampling_kernels = None if offered is None else offered(runtime)
    return ServedModel(contract, config, runtime, static, cache, stages, sampling_kernels)


def check(
    contract: ModelContract,
    config: ModelConfig,
    runtime: RuntimeConfig,
    requirements: ServingRequirements = SERVING_REQUIREMENTS,
) -> LoadedKernelModules:
    """Everything that can be told before anything is compiled; returns the loaded kernels.

    Raises the first of the `problems`.
    """
    for problem in _description_problems(contract, config, runtime, requirements):
        raise problem
    loaded = contract.hooks.load_kernels()
    for problem in _loaded_problems(contract, loaded, config, runtime):
        raise problem
    found = sorted(requirements.found_optional(contract))
    logger.info(
        "contract %s %s%s",
        contract.model,
        contract.abi_fingerprint(),
        f", optional {', '.join(found)}" if found else "",
    )
    return loaded


def problems(
    contract: ModelContract,
    config: ModelConfig,
    runtime: RuntimeConfig,
    requirements: ServingRequirements = SERVING_REQUIREMENTS,
) -> Iterator[ContractMismatch]:
    """Everything that does not fit, as far as it can be told without compiling or loading."""
    yield from _description_problems(contract, config, runtime, requirements)
    yield from _loaded_problems(contract, contract.hooks.load_kernels(), config, runtime)


def _description_problems(
    contract: ModelContract,
    config: ModelConfig,
    runtime: RuntimeConfig,
    requirements: ServingRequirements,
) -> Iterator[ContractMismatch]:
    """What can be told before the kernels are loaded."""
    yield from requirements.of_run(runtime).problems(contract)
    yield from _stage_problems(contract)
    yield from _limit_problems(contract, config, runtime)


def _loaded_problems(
    contract: ModelContract,
    loaded: LoadedKernelModules,
    config: ModelConfig,
    runtime: RuntimeConfig,
) -> Iterator[ContractMismatch]:
    """What only the loaded kernels tell."""
    yield from _kernel_problems(contract, loaded)
    try:
        contract.hooks.validate_kernels(loaded, config, runtime)
    except ContractMismatch as problem:
        yield problem


def _stage_problems(contract: ModelContract) -> Iterator[ContractMismatch]:
    """Where a stage's description contradicts itself."""
    public_names: dict[str, str] = {}
    for key, kernel in contract.kernels.items():
        where = f"kernels[{key}]"
        if kernel.name != key:
            yield contract.mismatch(f"{where}.name", found=kernel.name, expected=key)
        other = public_names.setdefault(kernel.public_name, key)
        if other != key:
            yield contract.mismatch(
                f"{where}.public_name",
                found=f"{kernel.public_name!r}, as in kernels[{other}]",
                expected="a name of its own",
                hint="Compiled artefacts are filed under it.",
            )
        names = [arg.name for arg in kernel.args]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                yield contract.mismatch(
                    f"{where}.args", found=f"{name!r} twice", expected="each name once"
                )
        for arg in kernel.args:
            if arg.dtype not in DTYPES and arg.dtype != MODEL_DTYPE:
                yield contract.mismatch(
                    f"{kernel.public_name}.{arg.name} dtype",
                    found=arg.dtype,
                    expected=f"one of {', '.join([*DTYPES, MODEL_DTYPE])}",
                )
            if arg.direction not in ("in", "out", "inout"):
                yield contract.mismatch(
                    f"{kernel.public_name}.{arg.name} direction",
                    found=arg.direction,
                    expected="in, out or inout",
                )
        if all(arg.direction == "in" for arg in kernel.args):
            yield contract.mismatch(
                f"{where}.args", found="no output", expected="an argument that is out or inout"
            )


def _limit_problems(
    contract: ModelContract, config: ModelConfig, runtime: RuntimeConfig
) -> Iterator[ContractMismatch]:
    """Where the model or the run lies outside the contract's limits.

    Limits that are not known here are the contract's own business (`validate_kernels`).
    """
    sizes = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "real_vocab": config.vocab_size,
        "vocab": contract.hooks.logits_width(config),
    }
    for name, found in sizes.items():
        if name in contract.limits and found != contract.limits[name]:
            yield contract.mismatch(
                f"limits[{name}]",
                found=found,
                expected=contract.limits[name],
                hint="The kernels were built for another model.",
            )
    for name, flag, found, fits, expected in (
        ("max_seq", "max-model-len", runtime.max_seq_len, operator.le, "at most"),
        ("max_rows", "max-rows", runtime.max_batch_size, operator.le, "at most"),
        ("min_kv_pages", "kv-pages", runtime.total_kv_pages, operator.ge, "at least"),
        ("page_size", "page-size", runtime.page_size, operator.eq, "exactly"),
    ):
        limit = contract.limits.get(name)
        if limit is not None and not fits(found, limit):
            yield contract.mismatch(
                f"limits[{name}]",
                found=found,
                expected=f"{expected} {limit}",
                hint=f"Start the worker with --{flag} {limit}.",
            )


def _kernel_problems(
    contract: ModelContract, loaded: LoadedKernelModules
) -> Iterator[ContractMismatch]:
    """Where a kernel's parameters are not its stage's arguments."""
    for key, kernel in contract.kernels.items():
        function = loaded.functions.get(key)
        if function is None:
            yield contract.mismatch(
                f"kernels[{key}]",
                found=f"functions {sorted(loaded.functions)}",
                expected=f"a function {key!r}",
                hint="The kernels and this contract come from different versions.",
            )
            continue
        parameters = list(inspect.signature(function).parameters)
        declared = [arg.name for arg in kernel.args]
        if len(parameters) != len(declared):
            yield contract.mismatch(
                f"{kernel.public_name} arity",
                found=f"a kernel of {len(parameters)} parameters",
                expected=f"{len(declared)} declared arguments",
                hint=_difference(parameters, declared),
            )
        elif parameters != declared:
            pairs = enumerate(zip(parameters, declared, strict=True))
            position, (parameter, name) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            yield contract.mismatch(
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

"""Checks of what a contract says of itself, and of what it prepares before the first step."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest

from torch import Tensor

from tidemill_contracts.models import registry, startup
from tidemill_contracts.models.args import ArgChecker
from tidemill_contracts.models.conformance.harness import Row
from tidemill_contracts.models.conformance.session import CheckFailed, CheckSkipped, Session
from tidemill_contracts.models.contract import KernelSpec, StageInputs
from tidemill_contracts.models.errors import ModelError, UnsupportedModel

WEIGHT_BYTES_SLACK = 0.05
"""By how much the announced size of the weights may be off: the worker plans its pages by it."""


def start_up(session: Session) -> None:
    """The contract accepts the model, compiles its stages, loads the weights and makes a cache."""
    found = list(startup.problems(session.contract, session.case.config, session.runtime))
    if found:
        raise CheckFailed(" / ".join(str(problem) for problem in found))
    session.model()


def arity(session: Session) -> None:
    """Each kernel takes exactly the arguments that its stage declares, by name and in order."""
    loaded = session.contract.hooks.load_kernels()
    for key, kernel in session.contract.kernels.items():
        if key not in loaded.functions:
            raise CheckFailed(f"load_kernels() has no function {key!r}: {sorted(loaded.functions)}")
        taken = list(inspect.signature(loaded.functions[key]).parameters)
        declared = [spec.name for spec in kernel.args]
        for position, (ours, theirs) in enumerate(zip_longest(taken, declared)):
            if ours != theirs:
                raise CheckFailed(
                    f"{kernel.public_name}: the kernel takes {len(taken)} arguments, the stage"
                    f" declares {len(declared)}; argument {position} is {ours or 'none'} of the"
                    f" kernel, {theirs or 'none'} of the stage"
                )


def arg_specs(session: Session) -> None:
    """The compile arguments have the declared dtypes and shapes, and one size for each symbol."""
    sizes: dict[str, tuple[int, str]] = {}
    for kernel in session.contract.kernels.values():
        for symbol, size in _checker(session, kernel).sizes.items():
            if symbol in kernel.dynamic_symbols:
                continue
            other, where = sizes.setdefault(symbol, (size, kernel.public_name))
            if size != other:
                raise CheckFailed(
                    f"{symbol} is {other} in {where}, but {size} in {kernel.public_name}"
                )


def builder_order(session: Session) -> None:
    """The builders put every tensor where its stage declares it, on each call anew."""
    model = session.model()
    for kernel in (session.contract.stage(phase) for phase in model.stages):
        checker = _checker(session, kernel)
        for inputs in _two_calls(session, kernel):
            args = kernel.runtime_args_builder(inputs, model.static, model.cache)
            checker.check(args)
            named = {name: value for name, value in inputs.named().items() if value is not None}
            pools = {"k_cache": model.cache.k, "v_cache": model.cache.v}
            checker.check_sources(args, {**named, **model.static.named(), **pools})
            written = [inputs.logits, model.cache.k, model.cache.v]
            for spec, arg in zip(kernel.args, args, strict=True):
                if spec.direction == "in" and any(arg is tensor for tensor in written):
                    raise CheckFailed(
                        f"{kernel.public_name}.{spec.name} is written, but declared `in`"
                    )


def _checker(session: Session, kernel: KernelSpec) -> ArgChecker:
    """Binds the symbols of a stage. Raises `ContractMismatch` where its compile arguments do not
    fit its specs."""
    return ArgChecker(
        session.contract.identity,
        kernel.public_name,
        kernel.args,
        kernel.dynamic_symbols,
        kernel.compile_args_builder(session.case.config, session.runtime),
        session.runtime.dtype,
    )


def _two_calls(session: Session, kernel: KernelSpec) -> list[StageInputs]:
    """The inputs of two calls of one stage, taken on their way."""
    seen: list[StageInputs] = []

    def note(inputs: StageInputs) -> StageInputs:
        seen.append(inputs)
        return inputs

    harness, row = session.harness(), Row()
    contract = session.contract
    if kernel is contract.stage("prefill"):
        harness.prefill((row, session.tokens(5)), edit=note)
        harness.prefill((row, session.tokens(3)), edit=note)
    elif kernel is contract.stage("decode"):
        harness.prefill((row, session.tokens(5)))
        harness.decode((row, 1), edit=note)
        harness.decode((row, 0), edit=note)
    else:
        harness.score((row, session.tokens(5)), logit_rows=[4, 1], edit=note)
        harness.score((row, session.tokens(3)), logit_rows=[0], edit=note)
    return seen


def fingerprint_stability(session: Session) -> None:
    """The fingerprint is the same after loading, after a copy, and in another process."""
    contract = session.contract
    found = {
        "after the model was loaded": contract.abi_fingerprint(),
        "of a copy": dataclasses.replace(contract).abi_fingerprint(),
    }
    if json.dumps(contract.abi(), sort_keys=True) != json.dumps(contract.abi(), sort_keys=True):
        raise CheckFailed("two calls of abi() differ")
    try:
        made = registry.get_contract(contract.model.family, contract.model.variant)
    except UnsupportedModel:
        made = None
    if made == contract:
        found["in another process"] = _elsewhere(contract.model.family, contract.model.variant)
    for where, fingerprint in found.items():
        if fingerprint != session.fingerprint:
            raise CheckFailed(f"{fingerprint[:12]} {where}, {session.fingerprint[:12]} before")


@cache
def _elsewhere(family: str, variant: str) -> str:
    """The fingerprint as a new interpreter computes it, whose sets have another order."""
    script = (
        "import sys; from tidemill_contracts.models.registry import get_contract;"
        "print(get_contract(*sys.argv[1:]).abi_fingerprint())"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", script, family, variant],
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ModelError(f"The contract cannot be made in another process: {done.stderr[-500:]}")
    return done.stdout.split()[-1]


def weights_exported_once(session: Session) -> None:
    """The checkpoint is used up; each final tensor goes through the exporter exactly once."""
    model = session.model()
    named = model.static.named()
    if not named and not session.exports:
        raise CheckSkipped("the weights lie where this process does not see them")
    for number, export in enumerate(session.exports):
        for earlier in session.exports[:number]:
            if _same_memory(export.given, earlier.given):
                raise CheckFailed(
                    f"a tensor of shape {list(export.given.shape)} was exported twice"
                    f"{_called(export.returned, named)}{_called(earlier.returned, named)}"
                )
        if not any(_same_memory(export.returned, tensor) for tensor in named.values()):
            raise CheckFailed(
                f"a tensor of shape {list(export.returned.shape)} was exported, but is none of the"
                " prepared weights"
            )
    for name, tensor in named.items():
        if not any(_same_memory(tensor, export.returned) for export in session.exports):
            raise CheckFailed(f"{name} {list(tensor.shape)} is not what the exporter returned")
    if session.source is not None and (left := session.source.names()):
        raise CheckFailed(f"tensors are left in the checkpoint: {', '.join(left)}")


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.shape == other.shape
    )


def _called(tensor: Tensor, named: Mapping[str, Tensor]) -> str:
    names = [name for name, other in named.items() if other is tensor]
    return f" ({', '.join(names)})" if names else ""


def weight_bytes(session: Session) -> None:
    """The size that the contract announces is the size that the prepared weights have."""
    said = session.contract.hooks.weight_bytes(session.case.config, session.runtime)
    found = session.model().static.nbytes
    if abs(found - said) > WEIGHT_BYTES_SLACK * said:
        raise CheckFailed(f"weight_bytes() says {said:,}, the prepared weights take {found:,}")

"""Configuration of the PyPTO backend: one frozen struct, the same names in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidemill_contracts.models.errors import ModelError

ROOT_VARIABLE = "PYPTO_LIB_ROOT"
"""Turns the adapter on; the name is the one that pypto-serving uses."""
ENV_PREFIX = "TIDEMILL_PYPTO_"

REGISTRY_FILE = Path("contract", "registry.py")
"""What a checkout is recognised by, relative to its root."""


class PyptoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set about the backend.

    `platform`, `device_id`, `backend_type`, `block_dim`, `aicpu_thread_num`, `kernel_cache` and
    `codegen_only` go into PyPTO's ``RunConfig`` and ``DistributedConfig``. Their defaults, and the
    three below that are not RunConfig's own, are those of pypto-serving's Qwen3 executor.
    """

    lib_root: Annotated[str, Meta(description="The pypto-lib checkout, absolute.")]
    contract: Annotated[
        str,
        Meta(
            pattern=r"^qwen3/[a-z0-9._-]+$",
            description="Which of the checkout's contracts, family/variant.",
        ),
    ] = "qwen3/14b"
    platform: Annotated[
        Literal["a2a3", "a2a3sim", "a5", "a5sim"],
        Meta(description="Ascend 910B (a2a3) or 950 (a5), or its simulator."),
    ] = "a2a3"
    device_id: Annotated[int, Meta(ge=0, description="Index of the NPU.")] = 0
    backend_type: Annotated[
        str | None,
        Meta(description="Name of a PyPTO BackendType; the platform's by default."),
    ] = None
    block_dim: Annotated[int, Meta(ge=1, description="Logical blocks of a kernel launch.")] = 24
    aicpu_thread_num: Annotated[int, Meta(ge=1, description="AICPU threads of a launch.")] = 4
    kernel_cache: Annotated[
        str | None,
        Meta(description="Directory for generated kernels; PyPTO's choice by default."),
    ] = None
    codegen_only: Annotated[
        bool,
        Meta(description="Stop compiling after code generation; the device worker assembles."),
    ] = True
    step_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that one step may take before it fails.")
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Seconds for each part of a start: import, compile, weights, …"),
    ] = 900.0

    @property
    def family(self) -> str:
        return self.contract.partition("/")[0]

    @property
    def variant(self) -> str:
        return self.contract.partition("/")[2]

    def shown(self) -> dict[str, object]:
        """Every value, for printing; none is secret."""
        values: dict[str, object] = msgspec.structs.asdict(self)
        return values


def options_from_env(environ: Mapping[str, str]) -> PyptoOptions | None:
    """The options that the environment gives, ``None`` where ``PYPTO_LIB_ROOT`` is unset or empty.

    Raises `ModelError` naming the variable where a value is out of range, a ``TIDEMILL_PYPTO_…``
    variable is unknown, or the root is not a pypto-lib checkout.
    """
    root = environ.get(ROOT_VARIABLE)
    if not root:
        return None
    path = Path(root).expanduser().resolve()
    if not (path / REGISTRY_FILE).is_file():
        raise ModelError(
            f"{ROOT_VARIABLE}={root} is not a pypto-lib checkout: it has no {REGISTRY_FILE}."
        )
    settable = {name for name in PyptoOptions.__struct_fields__ if name != "lib_root"}
    values: dict[str, object] = {"lib_root": str(path)}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in settable:
                known = ", ".join(sorted(ENV_PREFIX + item.upper() for item in settable))
                raise ModelError(f"{variable} is not an option; there are: {known}.")
            values[name] = value
    try:
        return msgspec.convert(values, PyptoOptions, strict=False)
    except msgspec.ValidationError as error:
        message, _, path_ = str(error).partition(" - at `$.")
        variable = f"{ENV_PREFIX}{path_.rstrip('`').upper()}"
        raise ModelError(f"{variable}: {message}.") from error

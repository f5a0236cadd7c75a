"""What can be wrong between a worker, a contract and a model directory.

ModelError
├── CheckpointError          files missing, truncated, misshapen or left over
├── UnsupportedModel         no contract matches the model's configuration
│   └── ContractNotImplemented   one does, but it is only planned
├── ContractMismatch         a contract, its kernels, the model and the worker disagree
└── BackendError             a backend outside this process died or did not answer in time
    └── KVCacheLost          so are the rows' K and V; computed anew, the rows can run
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_contracts.wire.errors import TidemillError


class ModelError(TidemillError):
    """Base of what stops a model from being served."""


class CheckpointError(ModelError):
    """A model directory cannot be loaded; the message names the file and the tensor."""


class UnsupportedModel(ModelError):
    """No registered contract matches the model's configuration."""


class ContractNotImplemented(UnsupportedModel):
    """The matching contract is planned, not built."""


class BackendError(ModelError):
    """A backend outside this process died or did not answer in time."""


class KVCacheLost(BackendError):
    """A row's K and V were in a backend that is gone; computed anew from its tokens, it can run."""


@dataclass(frozen=True, slots=True)
class ContractIdentity:
    """Which contract an error speaks of."""

    family: str
    variant: str
    schema_version: str
    fingerprint: str

    def __str__(self) -> str:
        return (
            f"{self.family}/{self.variant} contract (schema {self.schema_version},"
            f" fingerprint {self.fingerprint[:12]})"
        )


class ContractMismatch(ModelError):
    """A contract cannot serve this worker, model or device.

    `field` names what disagrees, `found` and `expected` the two sides, `hint` what to do.
    """

    def __init__(
        self,
        contract: ContractIdentity,
        field: str,
        *,
        found: object,
        expected: object,
        hint: str = "",
    ) -> None:
        message = f"{contract}: {field}: found {found}, expected {expected}"
        super().__init__(f"{message}. {hint}" if hint else message)
        self.contract = contract
        self.field = field
        self.found = found
        self.expected = expected
        self.hint = hint

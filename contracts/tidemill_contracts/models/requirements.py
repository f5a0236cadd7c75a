"""The worker's side of the contract: what it needs before anything is loaded or compiled."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill_contracts.models.contract import CONTRACT_SCHEMA_VERSION, ModelContract, Phase
from tidemill_contracts.models.errors import ContractMismatch


@dataclass(frozen=True, slots=True)
class ServingRequirements:
    """What a worker asks of a contract."""

    schema_version: str = CONTRACT_SCHEMA_VERSION
    required_phases: tuple[Phase, ...] = ("prefill", "decode")
    required_capabilities: frozenset[str] = frozenset({"paged_kv", "chunked_prefill"})
    optional_capabilities: frozenset[str] = frozenset()

    def check(self, contract: ModelContract) -> None:
        """Raises `ContractMismatch` for the first thing that the contract lacks."""
        name = contract.describe()
        if contract.schema_version != self.schema_version:
            raise ContractMismatch(
                name,
                "schema_version",
                found=contract.schema_version,
                expected=self.schema_version,
                hint="Use a Tidemill release that speaks this contract's schema.",
            )
        for phase in self.required_phases:
            stages = contract.execution.get(phase, ())
            if len(stages) != 1 or stages[0] not in contract.kernels:
                raise ContractMismatch(
                    name,
                    f"execution[{phase}]",
                    found=list(stages),
                    expected="exactly one registered stage",
                )
        missing = self.required_capabilities - contract.capabilities
        if missing:
            raise ContractMismatch(
                name,
                "capabilities",
                found=sorted(contract.capabilities),
                expected=f"also {', '.join(sorted(missing))}",
            )

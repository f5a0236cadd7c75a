"""The worker's side of the contract: what it needs, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tidemill_contracts.models.contract import (
    CONTRACT_SCHEMA_VERSION,
    DETERMINISTIC,
    OPTIONAL_PHASES,
    ModelContract,
    Phase,
    RuntimeConfig,
)
from tidemill_contracts.models.errors import ContractMismatch


@dataclass(frozen=True, slots=True)
class ServingRequirements:
    """What a worker asks of a contract."""

    schema_version: str = CONTRACT_SCHEMA_VERSION
    required_phases: tuple[Phase, ...] = ("prefill", "decode")
    required_capabilities: frozenset[str] = frozenset({"paged_kv", "chunked_prefill"})
    optional_capabilities: frozenset[str] = frozenset(OPTIONAL_PHASES)
    """Used where the contract has them; `found_optional` says which it has."""

    def of_run(self, runtime: RuntimeConfig) -> ServingRequirements:
        """With what this run needs besides."""
        if not runtime.deterministic:
            return self
        return replace(self, required_capabilities=self.required_capabilities | {DETERMINISTIC})

    def problems(self, contract: ModelContract) -> Iterator[ContractMismatch]:
        """What the contract lacks."""
        if contract.schema_version != self.schema_version:
            yield contract.mismatch(
                "schema_version",
                found=contract.schema_version,
                expected=self.schema_version,
                hint="Use a Tidemill release that speaks this contract's schema.",
            )
        for phase in self.phases(contract):
            stages = contract.execution.get(phase, ())
            if len(stages) != 1 or stages[0] not in contract.kernels:
                yield contract.mismatch(
                    f"execution[{phase}]",
                    found=list(stages),
                    expected=f"exactly one of the stages {sorted(contract.kernels)}",
                    hint="The worker runs one stage for each phase.",
                )
        for capability, phase in OPTIONAL_PHASES.items():
            if phase in contract.execution and capability not in contract.capabilities:
                yield contract.mismatch(
                    "capabilities",
                    found=sorted(contract.capabilities),
                    expected=f"also {capability}, since there is a phase {phase!r}",
                    hint="Nobody would run it.",
                )
        missing = self.required_capabilities - contract.capabilities
        if missing:
            yield contract.mismatch(
                "capabilities",
                found=sorted(contract.capabilities),
                expected=f"also {', '.join(sorted(missing))}",
                hint="`tidemill contracts list` shows what else there is.",
            )

    def check(self, contract: ModelContract) -> None:
        """Raises the first of the `problems`."""
        for problem in self.problems(contract):
            raise problem

    def phases(self, contract: ModelContract) -> tuple[Phase, ...]:
        """What the worker will run: the required phases, and the optional ones that there are."""
        found = self.found_optional(contract)
        optional = (phase for name, phase in OPTIONAL_PHASES.items() if name in found)
        return (*self.required_phases, *optional)

    def found_optional(self, contract: ModelContract) -> frozenset[str]:
        return self.optional_capabilities & contract.capabilities


SERVING_REQUIREMENTS = ServingRequirements()
"""What Tidemill's own worker asks for."""

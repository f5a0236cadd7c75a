"""The in-tree Qwen3 contracts: dense and mixture-of-experts models, on any torch device, and dense
ones in int8 on the CPU.

Importing this package imports no kernels; they come with `ModelHooks.load_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill_contracts.models.contract import ContractRegistration, ModelContract
from tidemill_contracts.models.qwen3.variants import MODEL_TYPES, QUANTIZED, VARIANTS, Variant


def _factory(variant: Variant) -> Callable[[], ModelContract]:
    def make() -> ModelContract:
        from tidemill_contracts.models.qwen3.contract import contract_of

        return contract_of(variant)

    return make


REGISTRATIONS = tuple(
    ContractRegistration(
        "qwen3",
        variant.name,
        frozenset({MODEL_TYPES[variant.kind]}),
        _factory(variant),
        variant.matches,
        variant.quantization,
    )
    for variant in (*VARIANTS, *QUANTIZED)
)

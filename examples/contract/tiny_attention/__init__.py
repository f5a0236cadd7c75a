"""A contract for Tidemill: one layer of attention over token and position embeddings.

Importing this package imports no kernels: whoever lists contracts pays for none of them.
"""

from __future__ import annotations

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ContractRegistration, ModelContract

MODEL_TYPE = "tiny-attention"


def _matches(config: ModelConfig) -> bool:
    return config.num_hidden_layers == 1


def _contract() -> ModelContract:
    from tiny_attention.contract import tiny_contract

    return tiny_contract()


REGISTRATIONS = (
    ContractRegistration("tiny", "attention", frozenset({MODEL_TYPE}), _contract, _matches),
)

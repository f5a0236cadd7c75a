"""The in-tree Qwen3 contract: dense models of any size, on any torch device.

Importing this package imports no kernels; they come with `ModelHooks.load_kernels`.
"""

from __future__ import annotations

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ContractRegistration, ModelContract

ARCHITECTURE = "Qwen3ForCausalLM"
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"


def _is_dense(config: ModelConfig) -> bool:
    return config.model_type == "qwen3" and ARCHITECTURE in config.architectures


def _is_moe(config: ModelConfig) -> bool:
    return config.model_type == "qwen3_moe" and MOE_ARCHITECTURE in config.architectures


def _dense() -> ModelContract:
    from tidemill_contracts.models.qwen3.contract import dense_contract

    return dense_contract()


REGISTRATIONS = (
    ContractRegistration("qwen3", "dense", frozenset({"qwen3"}), _dense, _is_dense),
    ContractRegistration("qwen3", "moe", frozenset({"qwen3_moe"}), None, _is_moe),
)

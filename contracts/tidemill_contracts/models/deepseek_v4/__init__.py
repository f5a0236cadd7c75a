"""DeepSeek-V4, planned: known by its configuration, so that the refusal can say so."""

from __future__ import annotations

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ContractRegistration

MODEL_TYPES = frozenset({"deepseek_v4"})
FLASH_LAYERS = 43
"""DeepSeek-V4-Flash as published; Pro is deeper."""


def _is_flash(config: ModelConfig) -> bool:
    return config.num_hidden_layers == FLASH_LAYERS


REGISTRATIONS = (
    ContractRegistration("deepseek-v4", "flash", MODEL_TYPES, factory=None, matcher=_is_flash),
    ContractRegistration("deepseek-v4", "pro", MODEL_TYPES, factory=None),
)

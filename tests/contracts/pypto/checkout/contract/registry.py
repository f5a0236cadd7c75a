"""Finds the contracts of this checkout; the variant's folder is importable only meanwhile."""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path

from contract.base import ContractRegistration, ModelContract


@lru_cache(maxsize=1)
def _registration() -> ContractRegistration:
    folder = Path(__file__).resolve().parents[1] / "models" / "qwen3_tiny"
    spec = importlib.util.spec_from_file_location("_qwen3_tiny_contract", folder / "contract.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module.REGISTRATION


def get_contract(family: str, variant: str | None = None) -> ModelContract:
    registration = _registration()
    if (registration.family, registration.variant) != (family, variant):
        raise KeyError(f"unsupported external contract: family={family!r}, variant={variant!r}")
    return registration.factory()


def find_contract_for_model_config(model_config: object) -> ModelContract:
    registration = _registration()
    if not registration.matcher(model_config):
        raise KeyError(f"unsupported external contract for {model_config.model_id}")
    return registration.factory()

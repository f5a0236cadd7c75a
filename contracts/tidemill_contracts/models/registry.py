"""Which contracts there are, and which one serves a model.

A contract is chosen by structured fields of the model's configuration, never by a model's name
or path, and is made once per process.
"""

from __future__ import annotations

from functools import cache

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ContractRegistration, ModelContract
from tidemill_contracts.models.errors import ContractNotImplemented, UnsupportedModel


@cache
def registrations() -> tuple[ContractRegistration, ...]:
    """Every known contract, in the order in which they are tried."""
    # Kernels are imported by the contract's factory, not by knowing that it exists.
    from tidemill_contracts.models.qwen3 import REGISTRATIONS

    return REGISTRATIONS


@cache
def get_contract(family: str, variant: str) -> ModelContract:
    """The contract of this family and variant.

    Raises `UnsupportedModel` where none is registered, `ContractNotImplemented` where it is
    planned only.
    """
    for registration in registrations():
        if (registration.family, registration.variant) == (family, variant):
            if not registration.implemented:
                raise ContractNotImplemented(
                    f"The contract {family}/{variant} is planned but not implemented."
                )
            return registration.factory()
    known = ", ".join(f"{r.family}/{r.variant}" for r in registrations() if r.implemented)
    raise UnsupportedModel(f"There is no contract {family}/{variant}; there are: {known}.")


def find_contract_for_model_config(config: ModelConfig) -> ModelContract:
    """The first contract whose matcher accepts `config`.

    Raises `UnsupportedModel` naming architecture and model type, `ContractNotImplemented` where
    the match is planned only.
    """
    for registration in registrations():
        if registration.matcher(config):
            if not registration.implemented:
                raise ContractNotImplemented(
                    f"{config.describe()} is a {registration.family}/{registration.variant} model:"
                    " support for it is planned but not implemented."
                )
            return get_contract(registration.family, registration.variant)
    known = ", ".join(f"{r.family}/{r.variant}" for r in registrations() if r.implemented)
    raise UnsupportedModel(
        f"{config.describe()} is not supported; the contracts here serve: {known}."
    )

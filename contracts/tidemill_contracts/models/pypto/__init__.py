"""The adapter for a pypto-lib checkout: kernels for Ascend NPUs, run in a child process.

``PYPTO_LIB_ROOT`` turns it on. Importing this package, and knowing that the contract exists,
starts nothing; matching a Qwen3 model or making the contract starts the child.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ContractRegistration, ModelContract
from tidemill_contracts.models.pypto.options import PyptoOptions, options_from_env

MODEL_TYPES = frozenset({"qwen3"})


def registrations(environ: Mapping[str, str] = os.environ) -> tuple[ContractRegistration, ...]:
    """The contract of the configured checkout; none where ``PYPTO_LIB_ROOT`` is unset.

    Raises `ModelError` naming the variable that is wrong.
    """
    options = options_from_env(environ)
    return () if options is None else (registration(options),)


def registration(options: PyptoOptions) -> ContractRegistration:
    """How the registry finds the checkout's contract: its own matcher decides."""

    def make() -> ModelContract:
        from tidemill_contracts.models.pypto.contract import contract_of

        return contract_of(options)

    def matches(config: ModelConfig) -> bool:
        from tidemill_contracts.models.pypto import contract

        return contract.matches(contract.session_of(options), config)

    return ContractRegistration(
        options.family, f"pypto-{options.variant}", MODEL_TYPES, make, matches
    )

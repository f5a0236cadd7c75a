"""Which contracts there are, and which one serves a model.

A contract is chosen by structured fields of the model's configuration, never by a model's name
or path, and is made once per process. Other distributions add theirs through the entry point
group ``tidemill.contracts``, whose entries are a `ContractRegistration` or a sequence of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from tidemill_contracts.models.config import ModelConfig, describe_raw, read_raw_config
from tidemill_contracts.models.contract import (
    ContractRegistration,
    ModelContract,
    Quantization,
)
from tidemill_contracts.models.errors import ContractNotImplemented, ModelError, UnsupportedModel

ENTRY_POINTS = "tidemill.contracts"


@cache
def registrations() -> tuple[ContractRegistration, ...]:
    """Every known contract, in the order in which they are tried: third parties' first, so that
    they can serve a model better than the contract in the tree does.

    Raises `ModelError` where an entry point cannot be loaded.
    """
    # Kernels are imported by a contract's factory, not by knowing that it exists.
    from tidemill_contracts.models import deepseek_v4, pypto, qwen3

    found: list[ContractRegistration] = []
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        found += _load(entry_point)
    return (*found, *pypto.registrations(), *qwen3.REGISTRATIONS, *deepseek_v4.REGISTRATIONS)


def _load(entry_point: metadata.EntryPoint) -> list[ContractRegistration]:
    try:
        value = entry_point.load()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"The contracts of {entry_point.value} cannot be loaded: {said}"
        ) from error
    entries = list(value) if isinstance(value, Sequence) else [value]
    if not all(isinstance(entry, ContractRegistration) for entry in entries):
        raise ModelError(f"{entry_point.value} is not a ContractRegistration, nor several of them.")
    return entries


def source_of(registration: ContractRegistration) -> str:
    """The package that a contract comes from."""
    if registration.factory is None:
        return "planned"
    return registration.factory.__module__.partition(".")[0]


@cache
def get_contract(family: str, variant: str) -> ModelContract:
    """The contract of this family and variant.

    Raises `UnsupportedModel` where none is registered, `ContractNotImplemented` where it is
    planned only.
    """
    for registration in registrations():
        if (registration.family, registration.variant) == (family, variant):
            if registration.factory is None:
                raise ContractNotImplemented(
                    f"The contract {family}/{variant} is planned but not implemented."
                )
            return registration.factory()
    raise UnsupportedModel(f"There is no contract {family}/{variant}; there are: {_known()}.")


def find_registration(
    config: ModelConfig, quantization: Quantization | None = None
) -> ContractRegistration:
    """The first registration that accepts `config` in that quantisation, planned ones included.

    Raises `UnsupportedModel` naming architecture and model type.
    """
    for registration in registrations():
        if (
            registration.quantization == quantization
            and config.model_type in registration.model_types
            and registration.matcher(config)
        ):
            return registration
    asked = "" if quantization is None else f" with --quantization {quantization}"
    raise UnsupportedModel(
        f"{config.describe()} is not supported{asked}; the contracts here serve{asked}:"
        f" {_known(quantization)}."
    )


def find_contract_for_model_config(
    config: ModelConfig, quantization: Quantization | None = None
) -> ModelContract:
    """The first contract whose matcher accepts `config` in that quantisation.

    Raises `UnsupportedModel` naming architecture and model type, `ContractNotImplemented` where
    the match is planned only.
    """
    registration = find_registration(config, quantization)
    if registration.factory is None:
        raise _planned(config.describe(), [registration])
    return get_contract(registration.family, registration.variant)


def open_model(
    model_dir: str | Path, quantization: Quantization | None = None
) -> tuple[ModelConfig, ModelContract]:
    """The configuration of a model directory, and the contract for it in that quantisation.

    A model that nothing here serves is told by its model type, before its fields are read: a
    foreign configuration need not have the fields that ours have. Raises `CheckpointError`,
    `UnsupportedModel` and `ContractNotImplemented`.
    """
    raw = read_raw_config(model_dir)
    check_model_type(raw, str(model_dir))
    config = ModelConfig.from_hf(raw, str(model_dir))
    return config, find_contract_for_model_config(config, quantization)


def check_model_type(raw: Mapping[str, object], model_id: str) -> None:
    """Raises where no contract serves the configuration's ``model_type``."""
    model_type = raw.get("model_type")
    candidates = [r for r in registrations() if model_type in r.model_types]
    description = describe_raw(raw, model_id)
    if not candidates:
        raise UnsupportedModel(
            f"{description} is not supported; the contracts here serve: {_known()}."
        )
    if not any(candidate.implemented for candidate in candidates):
        raise _planned(description, candidates)


def _planned(
    description: str, candidates: Iterable[ContractRegistration]
) -> ContractNotImplemented:
    names = " or ".join(f"{r.family}/{r.variant}" for r in candidates)
    return ContractNotImplemented(
        f"{description} is a {names} model: support for it is planned but not implemented."
    )


def _known(quantization: Quantization | None = None) -> str:
    served = (r for r in registrations() if r.implemented and r.quantization == quantization)
    return ", ".join(f"{r.family}/{r.variant}" for r in served) or "nothing"

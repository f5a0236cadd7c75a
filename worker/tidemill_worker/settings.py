"""The worker's configuration: one frozen struct, the same names in Python, as flags and as
``TIDEMILL_…`` environment variables."""

from __future__ import annotations

import os
import socket
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar, get_args, get_origin

import click
import msgspec
from msgspec import Meta

from tidemill_contracts import keys
from tidemill_contracts.urls import BadRedisUrl, mask_url, parse_url
from tidemill_contracts.wire import TidemillError

ENV_PREFIX = "TIDEMILL_"

Command = TypeVar("Command", bound=Callable[..., object])


class SettingsError(TidemillError):
    """A setting has a value that it cannot have; the message names it."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set about a worker."""

    model: Annotated[str, Meta(description="Model directory, Hub id, or 'demo'.")] = "demo"
    served_model_name: Annotated[
        str | None, Meta(description="Name that jobs may ask for; the directory's by default.")
    ] = None
    redis_url: Annotated[
        str, Meta(description="URL of the queue's server; docs/redis.md has every form.")
    ] = "redis://127.0.0.1:6379/0"
    queue: Annotated[str, Meta(description="Name of the queue.")] = keys.DEFAULT_QUEUE
    worker_id: Annotated[
        str | None, Meta(description="Name of this worker; host and process id by default.")
    ] = None

    device: Annotated[str, Meta(description="Where the model runs: cpu, cuda, cuda:1, …")] = "cpu"
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        Meta(description="Of weights and KV cache; the checkpoint's by default."),
    ] = None
    quantization: Annotated[
        Literal["int8"] | None,
        Meta(description="Rounds the matrices of a dense model while it loads; on the CPU only."),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(description="Same bits for a job whatever runs with it; slower, on the CPU only."),
    ] = False
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="CPU threads for the model; torch's choice by default."),
    ] = None

    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest job in tokens, prompt and output; the model's by default."),
    ] = None
    max_rows: Annotated[int, Meta(ge=1, le=4096, description="Most jobs that run in one step.")] = (
        32
    )
    max_step_tokens: Annotated[int, Meta(ge=1, description="Most tokens computed in one step.")] = (
        2048
    )
    target_tpot_ms: Annotated[
        Annotated[float, Meta(gt=0, le=600_000)] | None,
        Meta(
            description="Longest step while rows decode: prompts wait for it; no limit by default."
        ),
    ] = None
    max_wait_ms: Annotated[
        float,
        Meta(ge=0, le=60_000, description="How long an idle engine waits for a batch to gather."),
    ] = 5.0
    page_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Tokens per KV page; the contract's, or 32, by default."),
    ] = None
    kv_pages: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Pages of KV cache; from the free memory by default."),
    ] = None
    kernels: Annotated[
        Literal["auto", "torch"],
        Meta(description="The fastest kernels that the machine runs, or those in plain torch."),
    ] = "auto"
    prefix_caching: Annotated[
        bool, Meta(description="Share the KV cache of common prefixes between jobs.")
    ] = True
    speculate: Annotated[
        int, Meta(ge=0, le=64, description="Most tokens to guess ahead of a job in a step.")
    ] = 0
    default_max_tokens: Annotated[
        int, Meta(ge=1, description="Tokens to generate where a job does not say.")
    ] = 1024

    lease_ms: Annotated[
        int,
        Meta(ge=1_000, le=600_000, description="How soon a dead worker's jobs go to another."),
    ] = 15_000
    max_tries: Annotated[
        int, Meta(ge=1, description="Times that a job may be started before it is given up.")
    ] = 5
    result_ttl: Annotated[float, Meta(ge=1, description="Seconds that a result is kept for.")] = (
        keys.RESULT_TTL_MS / 1000
    )
    drain_timeout: Annotated[
        float, Meta(ge=0, description="Seconds to finish running jobs in, on SIGTERM.")
    ] = 25.0
    checkpoint_tokens: Annotated[
        int,
        Meta(
            ge=0, description="Tokens after which a job's progress is kept; 0 for no checkpoints."
        ),
    ] = 64
    checkpoint_s: Annotated[
        float,
        Meta(ge=0.1, description="Seconds after which it is kept where it has fewer new tokens."),
    ] = 5.0
    burst: Annotated[bool, Meta(description="Stop once the queue is empty.")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level to log.")
    ] = "info"

    def __post_init__(self) -> None:
        try:
            url = parse_url(self.redis_url)
        except BadRedisUrl as error:
            raise ValueError(
                f"redis_url: {mask_url(self.redis_url)} is not a Redis URL: {error}"
            ) from None
        if url.kind == "cluster":
            msgspec.structs.force_setattr(self, "queue", keys.in_one_slot(self.queue))

    @property
    def claim_limit(self) -> int:
        """Most jobs that the worker holds: the rows of a step and a few to fill gaps with."""
        return self.max_rows + max(1, self.max_rows // 8)

    @property
    def name(self) -> str:
        return self.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    def masked(self) -> dict[str, object]:
        """Every value, for printing: the password of the Redis URL is left out."""
        values: dict[str, object] = msgspec.structs.asdict(self)
        values["redis_url"] = mask_url(self.redis_url)
        return values


def make_config(values: Mapping[str, object]) -> WorkerConfig:
    """A validated configuration. Raises `SettingsError` naming the setting."""
    try:
        return msgspec.convert(dict(values), WorkerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error).replace("`$.", "`")) from error


def config_from_env(environ: Mapping[str, str] = os.environ) -> WorkerConfig:
    """The configuration that the ``TIDEMILL_…`` variables give, as for `arq`'s own command."""
    names = {ENV_PREFIX + name.upper(): name for name in WorkerConfig.__struct_fields__}
    return make_config({names[key]: value for key, value in environ.items() if key in names})


def config_options(command: Command) -> Command:
    """Gives a click command one option for each field of `WorkerConfig`."""
    for field in reversed(msgspec.structs.fields(WorkerConfig)):
        kind, description = _option_type(field.type)
        flag = "--redis" if field.name == "redis_url" else "--" + field.name.replace("_", "-")
        if field.default is True:
            flag = f"{flag}/--no-{flag[2:]}"
        command = click.option(
            flag,
            field.name,
            type=kind,
            is_flag=kind is bool,
            default=field.default,
            envvar=ENV_PREFIX + field.name.upper(),
            show_envvar=True,
            show_default=field.default is not None,
            help=description,
        )(command)
    return command


def _option_type(annotation: object) -> tuple[click.Choice[str] | type, str]:
    """The click type and the description of a field."""
    description = ""
    while get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        if get_origin(annotation) is Annotated:
            annotation, *metas = get_args(annotation)
            texts = [meta.description for meta in metas if isinstance(meta, Meta)]
            description = next((text for text in texts if text), description)
        else:
            annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation)), description
    assert isinstance(annotation, type)
    return annotation, description

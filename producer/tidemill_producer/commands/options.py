"""Options that several subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from tidemill_contracts import keys

Command = TypeVar("Command", bound=Callable[..., object])

URL_FORMS = "redis://, rediss://, unix://; docs/redis.md has those of Sentinel and clusters"

queue_option = click.option(
    "--queue",
    default=keys.DEFAULT_QUEUE,
    show_default=True,
    envvar="TIDEMILL_QUEUE",
    show_envvar=True,
    help="Name of the queue.",
)


def redis_option(what: str, default: str | None = None) -> Callable[[Command], Command]:
    """`what`: what the server is for."""
    return click.option(
        "--redis",
        "redis_url",
        metavar="URL",
        default=default,
        show_default=default is not None,
        envvar="TIDEMILL_REDIS_URL",
        show_envvar=True,
        help=f"{what}: {URL_FORMS}.",
    )

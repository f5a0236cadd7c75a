"""`tidemill dead`: jobs that were given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import click
import msgspec

from tidemill_producer.client import DEFAULT_REDIS_URL, Producer
from tidemill_producer.commands.options import queue_option, redis_option
from tidemill_producer.dead import DeadLetter
from tidemill_producer.errors import UnknownJob

T = TypeVar("T")


@click.group(
    epilog="""\b
Examples:
  tidemill dead list
  tidemill dead show JOB
  tidemill dead requeue JOB JOB
  tidemill dead drop --all
"""
)
@redis_option("The queue's server", DEFAULT_REDIS_URL)
@queue_option
@click.pass_context
def dead(ctx: click.Context, redis_url: str, queue: str) -> None:
    """Jobs that were given up, after too many tries: list, show, queue again or drop them."""
    ctx.obj = redis_url, queue


@dead.command("list")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
@click.pass_obj
def list_(where: tuple[str, str], limit: int) -> None:
    """The dead jobs, those that died last first: id, when, tries, why."""
    letters, count = _ask(where, lambda producer: _list(producer, limit))
    for letter in letters:
        why = letter.history[-1].error if letter.history else "?"
        died = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.died_at))
        click.echo(f"{letter.id}  {died}  {len(letter.history)} tries  {why}")
    if count > len(letters):
        click.echo(f"… and {count - len(letters)} more", err=True)


@dead.command()
@click.argument("job_id", metavar="JOB")
@click.pass_obj
def show(where: tuple[str, str], job_id: str) -> None:
    """One dead job as JSON: its tries, and what it asked for."""
    letter = _ask(where, lambda producer: producer.dead.get(job_id))
    if letter is None:
        raise UnknownJob(f"There is no dead job {job_id} in {where[1]}")
    shown = {
        "id": letter.id,
        "died_at": letter.died_at,
        "history": letter.history,
        "job": letter.job,
    }
    click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())


@dead.command()
@click.argument("job_ids", metavar="JOB…", nargs=-1)
@click.option("--all", "all_", is_flag=True, help="Every dead job.")
@click.pass_context
def requeue(ctx: click.Context, job_ids: tuple[str, ...], all_: bool) -> None:
    """Queue dead jobs again, as new ones. Exits with 1 where one was not there to be queued."""

    async def run(producer: Producer) -> dict[str, bool]:
        return await producer.dead.requeue(await _chosen(producer, job_ids, all_))

    queued = _ask(ctx.obj, run)
    for job_id, done in queued.items():
        click.echo(f"{job_id}  {'queued' if done else 'not dead, or queued already'}")
    ctx.exit(0 if all(queued.values()) else 1)


@dead.command()
@click.argument("job_ids", metavar="JOB…", nargs=-1)
@click.option("--all", "all_", is_flag=True, help="Every dead job.")
@click.pass_obj
def drop(where: tuple[str, str], job_ids: tuple[str, ...], all_: bool) -> None:
    """Forget dead jobs."""

    async def run(producer: Producer) -> int:
        return await producer.dead.drop(await _chosen(producer, job_ids, all_))

    click.echo(f"dropped {_ask(where, run)}")


async def _list(producer: Producer, limit: int) -> tuple[Sequence[DeadLetter], int]:
    return await producer.dead.list(limit), await producer.dead.count()


async def _chosen(producer: Producer, job_ids: Sequence[str], all_: bool) -> Sequence[str]:
    if all_ == bool(job_ids):
        raise click.UsageError("Give ids of jobs, or --all")
    return await producer.dead.ids(await producer.dead.count()) if all_ else job_ids


def _ask(where: tuple[str, str], ask: Callable[[Producer], Awaitable[T]]) -> T:
    async def run() -> T:
        redis_url, queue = where
        async with Producer(redis_url, queue) as producer:
            return await ask(producer)

    return asyncio.run(run())

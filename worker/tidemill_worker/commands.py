"""The worker's subcommands of `tidemill`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import NoReturn

import click

from tidemill_worker.settings import WorkerConfig, config_options, make_config


@click.command(
    epilog="""\b
Examples:
  tidemill worker                                     the demo model, Redis on this machine
  tidemill worker --model ./Qwen3-0.6B --max-rows 64
  tidemill worker --model Qwen/Qwen3-0.6B --redis rediss://queue.example:6379/0

SIGTERM or Ctrl-C drains: running jobs are finished for up to --drain-timeout seconds and the
rest is handed back to the queue; a second one hands everything back at once.
"""
)
@config_options
def worker(**values: object) -> None:
    """Serve a model: take jobs from the queue, generate in full batches, write results."""
    config = make_config(values)
    configure_logging(config)
    # Until the worker handles its signals itself there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    # arq and torch take seconds to import: --help and bad settings need neither.
    from tidemill_worker.worker import TidemillWorker

    asyncio.set_event_loop(asyncio.new_event_loop())
    serving = TidemillWorker(config)
    serving.run()
    if serving.state == "loading":
        _leave()


def _leave() -> NoReturn:
    """Ends the process at once: a thread that loads a model can't be stopped, and Python would wait
    for it."""
    logging.getLogger("tidemill.worker").info("stopped before the model was loaded")
    logging.shutdown()
    os._exit(0)


def configure_logging(config: WorkerConfig) -> None:
    """One line per event on stderr; the configuration first, without secrets."""
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("arq").setLevel(max(level, logging.WARNING))
    logging.getLogger("asyncio").setLevel(max(level, logging.WARNING))
    shown = " ".join(f"{name}={value}" for name, value in config.masked().items() if value)
    logging.getLogger("tidemill").info("tidemill worker %s", shown)

"""Settings for arq's own command: ``arq tidemill_worker.WorkerSettings``."""

from __future__ import annotations

from arq.worker import func

from tidemill_contracts.wire.arq_format import GENERATE, deserializer, serializer
from tidemill_worker.connect import stock_arq_settings
from tidemill_worker.functions import generate, shutdown, startup
from tidemill_worker.settings import config_from_env

STOCK_JOB_TIMEOUT_S = 3600
"""A stock worker locks a job for this long when it dies: it renews nothing."""


def worker_settings() -> type:
    """The class that arq's command reads, from the ``TIDEMILL_…`` environment variables."""
    config = config_from_env()
    return type(
        "WorkerSettings",
        (),
        {
            "functions": [func(generate, name=GENERATE)],
            "on_startup": startup,
            "on_shutdown": shutdown,
            "queue_name": config.queue,
            "redis_settings": stock_arq_settings(config),
            "max_jobs": config.claim_limit,
            "max_tries": config.max_tries,
            "keep_result": config.result_ttl,
            "job_timeout": STOCK_JOB_TIMEOUT_S,
            "job_completion_wait": int(config.drain_timeout),
            "poll_delay": 0.1,
            "allow_abort_jobs": True,
            "job_serializer": serializer,
            "job_deserializer": deserializer,
            "log_results": False,
            "ctx": {"config": config},
        },
    )

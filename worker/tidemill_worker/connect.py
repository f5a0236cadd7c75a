"""The worker's connection to Redis: arq's pool, for the configured URL."""

from __future__ import annotations

from arq.connections import ArqRedis, RedisSettings, create_pool
from redis.exceptions import RedisError

from tidemill_contracts.urls import mask_url
from tidemill_contracts.wire import TidemillError
from tidemill_contracts.wire.arq_format import deserializer, serializer
from tidemill_worker.settings import SettingsError, WorkerConfig


class RedisUnreachable(TidemillError):
    """Redis does not answer when the worker starts."""


def redis_settings(config: WorkerConfig) -> RedisSettings:
    """arq's settings for the configured URL, which is not tried yet. Raises `SettingsError`."""
    try:
        return RedisSettings.from_dsn(config.redis_url)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(
            f"redis_url: {mask_url(config.redis_url)} is not a redis://, rediss:// or unix://"
            f" URL: {error}"
        ) from error


async def connect(config: WorkerConfig) -> ArqRedis:
    """A pool that Redis has answered. Raises `RedisUnreachable`."""
    try:
        return await create_pool(
            redis_settings(config),
            job_serializer=serializer,
            job_deserializer=deserializer,
            default_queue_name=config.queue,
        )
    except (RedisError, OSError) as error:
        raise RedisUnreachable(
            f"Redis does not answer at {mask_url(config.redis_url)}: {error}. Start it, or give"
            " its URL with --redis or TIDEMILL_REDIS_URL"
        ) from error

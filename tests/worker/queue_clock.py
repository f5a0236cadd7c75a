"""Lets time pass for a queue without waiting: every moment that Redis holds moves into the past."""

from __future__ import annotations

from redis.asyncio import Redis


async def pass_time(redis: Redis, queue: str, ms: int) -> None:
    """As if `ms` milliseconds had gone by since the last command."""
    for moments in (queue, f"{queue}:leases", f"{queue}:suspects", f"{queue}:dead"):
        for member, score in await redis.zrange(moments, 0, -1, withscores=True):
            if score > 0:  # a suspect that has spent its tries stands at 0
                await redis.zadd(moments, {member: score - ms})
    names = await redis.keys("*")
    async with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.pttl(name)
        left_ms = await pipe.execute()
        for name, left in zip(names, left_ms, strict=True):
            if left >= 0:
                # Redis deletes a key whose time to live is not positive.
                pipe.pexpire(name, left - ms)
        await pipe.execute()

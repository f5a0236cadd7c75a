"""The engine: rows, pages, the scheduler, the runner of the contract's stages, the sampler.

Knows no Redis and no asyncio. It runs in a thread of its own.
"""

from __future__ import annotations

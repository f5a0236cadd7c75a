"""Workers and server are killed, paused and restarted at random: no job is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.storm import Storm, scale_from_env

SCALE = scale_from_env()


@pytest.mark.slow
@pytest.mark.timeout(SCALE.limit_s + 60)
async def test_every_job_has_one_result_the_right_one(tmp_path: Path) -> None:
    await Storm(SCALE, tmp_path).run()

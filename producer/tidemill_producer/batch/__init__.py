"""Running a file of prompts through the queue: `tidemill batch` and `tidemill demo`."""

from __future__ import annotations

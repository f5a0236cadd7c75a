"""The producer's subcommands of `tidemill`."""

from __future__ import annotations

"""The demo model: its tasks, its tokenizer and the script that trains and exports it."""

from __future__ import annotations

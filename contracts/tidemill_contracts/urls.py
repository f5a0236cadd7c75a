"""Redis URLs as a person may see them."""

from __future__ import annotations

import re


def mask_url(url: str) -> str:
    """The URL without its secrets."""
    login_masked = re.sub(r"^((?:\w+://)?[^:@/]*):(?!//).*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", login_masked)

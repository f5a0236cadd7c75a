"""The model serving contract: types, registry, requirements, and the in-tree contracts.

Knows no scheduler and no Redis; imports torch.
"""

from __future__ import annotations

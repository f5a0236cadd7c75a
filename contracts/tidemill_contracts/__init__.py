"""What the parts of Tidemill agree on.

``wire`` holds the messages, ``keys`` every Redis key, ``models`` the model serving contract.
Importing this package, ``wire`` or ``keys`` loads neither torch, arq nor redis.
"""

from __future__ import annotations

"""What to do where a step needs more memory than there is: smaller steps, for a while."""

from __future__ import annotations

import traceback

import torch

RECOVER_AFTER = 64
"""Steps without trouble after which a limit is eased."""

_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)
"""Of torch's CPU allocator, of CUDA, of torch_npu and of the operating system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, in whatever way its backend says so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    message = str(error).lower()
    return any(text in message for text in _MESSAGES)


def free_memory_of(error: BaseException) -> None:
    """Frees the tensors of the call that failed, which its traceback keeps alive."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class CallLimit:
    """Most tokens of one call: halved when memory runs out, and eased slowly after that."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        """``None`` while there is no limit but the step's own."""
        self._ceiling = 0
        self._calm = 0

    def shrink(self, tokens: int) -> None:
        """A call of so many tokens was too much; there must be at least two."""
        self._ceiling = max(self._ceiling, tokens)
        self.tokens = min(tokens // 2, self.tokens or tokens)
        self._calm = 0

    def ease(self) -> None:
        """A step has gone well."""
        if self.tokens is None:
            return
        self._calm += 1
        if self._calm >= RECOVER_AFTER:
            self._calm = 0
            self.tokens += max(1, self.tokens // 4)
            if self.tokens >= self._ceiling:
                self.tokens, self._ceiling = None, 0

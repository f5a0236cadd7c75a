"""`SamplingKernels` by a C++ library of its own, which needs no matrix unit."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tidemill_contracts.models.contract import RuntimeConfig
from tidemill_contracts.models.errors import BackendError
from tidemill_contracts.models.qwen3.native.library import NoLibrary, load
from tidemill_contracts.models.sampling import NOT_FINITE, Draw, Telling, Told

logger = logging.getLogger("tidemill.contract")

SOURCES = ("sample.cpp", "team.h", "tiles.h", "vectors.h")
_OUTSIDE = -3


class DrawArgs(ctypes.Structure):
    """`Draw` in sample.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "biased", "allowed", "barred", "biases", "mask")
        ),
        *(
            (name, ctypes.c_double)
            for name in ("top_p", "presence_penalty", "frequency_penalty", "uniform")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "known", "prompt_len", "biases_count", "allowed_count", "barred_count", "top_k",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in ("temperature", "min_p", "repetition_penalty")
        ),
    )  # fmt: skip


class TellArgs(ctypes.Structure):
    """`Tell` in sample.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("listed", "logprob", "top_logprobs", "listed_logprobs", "top_ids")
        ),
        *((name, ctypes.c_int32) for name in ("line", "token_id", "top", "listed_count")),
    )


class NativeSampling:
    """The functions of the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, wide = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._open = library.tidemill_sampler
        self._open.argtypes, self._open.restype = [number], pointer
        self._draw, self._tell = library.tidemill_draw, library.tidemill_tell
        for function in (self._draw, self._tell):
            function.argtypes = [pointer, pointer, wide, number, number, pointer, pointer]
            function.restype = None
        self._samplers: dict[int, int] = {}

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        if not draws:
            return []
        vocabulary = logits.shape[1]
        held = _Held()
        args = (DrawArgs * len(draws))(*(_draw_args(draw, vocabulary, held) for draw in draws))
        tokens = (ctypes.c_int32 * len(draws))()
        self._call(self._draw, logits, len(draws), args, tokens)
        return list(tokens)

    def tell(self, logits: Tensor, tellings: Sequence[Telling]) -> list[Told | None]:
        if not tellings:
            return []
        held = _Held()
        tops = [min(telling.top, logits.shape[1]) for telling in tellings]
        logprobs = np.empty(len(tellings), np.float32)
        top_logprobs, listed_logprobs = (
            np.empty((len(tellings), max(widths)), np.float32)
            for widths in (tops, [len(telling.listed) for telling in tellings])
        )
        top_ids = np.empty(top_logprobs.shape, np.int32)
        args = (TellArgs * len(tellings))(
            *(
                TellArgs(
                    line=telling.line,
                    token_id=telling.token_id,
                    top=top,
                    listed=held.ids(telling.listed),
                    listed_count=len(telling.listed),
                    logprob=_line(logprobs, i),
                    top_logprobs=_line(top_logprobs, i),
                    top_ids=_line(top_ids, i),
                    listed_logprobs=_line(listed_logprobs, i),
                )
                for i, (telling, top) in enumerate(zip(tellings, tops, strict=True))
            )
        )
        states = (ctypes.c_int32 * len(tellings))()
        self._call(self._tell, logits, len(tellings), args, states)
        return [
            None
            if state == NOT_FINITE
            else Told(
                logprob=float(logprobs[i]),
                top=dict(zip(top_ids[i, :top].tolist(), top_logprobs[i].tolist(), strict=False)),
                listed=dict(zip(telling.listed, listed_logprobs[i].tolist(), strict=False)),
            )
            for i, (telling, top, state) in enumerate(zip(tellings, tops, states, strict=True))
        ]

    def _call(
        self,
        function: ctypes._NamedFuncPointer,
        logits: Tensor,
        count: int,
        args: ctypes.Array[DrawArgs] | ctypes.Array[TellArgs],
        states: ctypes.Array[ctypes.c_int32],
    ) -> None:
        assert logits.dtype == torch.float32
        assert logits.device.type == "cpu"
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        # The engine's thread decides how many there are, so they are asked for when it calls.
        threads = torch.get_num_threads()
        if threads not in self._samplers:
            self._samplers[threads] = self._open(threads)
        function(
            self._samplers[threads],
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            count,
            args,
            states,
        )
        if _OUTSIDE in states:
            raise BackendError("Sampling names a token that the vocabulary has not")


class _Held:
    """Keeps what pointers point to."""

    def __init__(self) -> None:
        self._held: list[object] = []

    def ids(self, ids: Iterable[int]) -> int:
        return self._address(array("i", ids))

    def values(self, values: Iterable[float]) -> int:
        return self._address(array("d", values))

    def mask(self, bits: np.ndarray) -> int:
        bits = np.ascontiguousarray(bits)
        self._held.append(bits)
        return bits.ctypes.data

    def _address(self, values: array[int] | array[float]) -> int:
        self._held.append(values)
        return values.buffer_info()[0]


def _draw_args(draw: Draw, vocabulary: int, held: _Held) -> DrawArgs:
    return DrawArgs(
        token_ids=held.ids(draw.token_ids),
        known=len(draw.token_ids),
        prompt_len=draw.prompt_len,
        biased=held.ids(draw.logit_bias),
        biases=held.values(draw.logit_bias.values()),
        biases_count=len(draw.logit_bias),
        allowed=held.ids(draw.allowed),
        allowed_count=len(draw.allowed),
        barred=held.ids(draw.barred),
        barred_count=len(draw.barred),
        mask=None if draw.mask is None else held.mask(draw.mask),
        repetition_penalty=draw.repetition_penalty,
        presence_penalty=draw.presence_penalty,
        frequency_penalty=draw.frequency_penalty,
        # One that float32 takes for 0 is still no greedy choice.
        temperature=draw.temperature and max(draw.temperature, torch.finfo(torch.float32).tiny),
        min_p=draw.min_p,
        top_k=min(draw.top_k, vocabulary),
        top_p=draw.top_p,
        uniform=draw.uniform,
    )


def _line(values: np.ndarray, line: int) -> int:
    return values.ctypes.data + line * values.strides[0]


@cache
def sampling(architecture: str = "native") -> NativeSampling:
    """Built where it is not there yet; `architecture` is the compiler's ``-march``. Raises
    `NoLibrary`."""
    return NativeSampling(load(SOURCES, architecture))


def native_sampling(runtime: RuntimeConfig) -> NativeSampling | None:
    """The library where a run may use it, ``None`` where it samples in torch."""
    if runtime.kernels == "torch" or runtime.device.type != "cpu":
        return None
    try:
        return sampling()
    except NoLibrary as reason:
        _tell_once(str(reason))
        return None


@cache
def _tell_once(reason: str) -> None:
    logger.info("tokens are chosen in plain torch: %s", reason)

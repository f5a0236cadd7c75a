"""Decorators in the shape of PyPTO's: kernels are plain torch functions.

For a simulator ``compile`` gives something to call, for a device a program that only a
`DistributedWorker` runs.
"""

from __future__ import annotations

from pypto.ir.distributed_compiled_program import DistributedCompiledProgram


class Kernel:
    def __init__(self, function):
        self._func = function

    def __call__(self, *args):
        return self._func(*args)


class HostKernel(Kernel):
    def compile(self, *dummies, config):
        def program(*args):
            if len(args) != len(dummies):
                raise TypeError(f"{len(dummies)} arguments, got {len(args)}")
            for dummy, arg in zip(dummies, args, strict=True):
                # Kernels of fixed shape, but for the packed tokens and the size of the pools.
                assert dummy.dtype is arg.dtype
                assert dummy.shape[1:] == arg.shape[1:]
            self._func(*args)

        if config.platform.endswith("sim"):
            return program
        return DistributedCompiledProgram(program, config)


class _Jit:
    host = staticmethod(HostKernel)

    def __call__(self, function):
        return Kernel(function)


jit = _Jit()

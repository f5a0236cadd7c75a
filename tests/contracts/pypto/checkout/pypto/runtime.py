"""A device worker in the shape of PyPTO's: it forks when it is made, so it sees only host memory
that was shared before, and keeps its own memory to itself."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from dataclasses import dataclass

import torch

from pypto.ir.distributed_compiled_program import DistributedConfig


@dataclass
class RunConfig:
    platform: str = "a2a3sim"
    device_id: int = 0
    codegen_only: bool = False
    save_kernels: bool = False
    save_kernels_dir: str | None = None
    distributed_config: DistributedConfig | None = None

    def __post_init__(self):
        if self.save_kernels_dir is not None:
            with open(os.path.join(self.save_kernels_dir, "platform"), "w") as file:
                file.write(self.platform)


@dataclass(frozen=True)
class DeviceTensor:
    data_ptr: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class DistributedWorker:
    def __init__(self, programs):
        self._programs = programs
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            torch.set_num_threads(1)
            _serve(theirs, programs)
        theirs.close()
        self._file = ours.makefile("rw")
        self._count = 0

    def alloc_tensor(self, shape, dtype, *, init=None):
        self._count += 1 << 40
        self._ask("alloc", self._count, list(shape), str(dtype).removeprefix("torch."))
        tensor = DeviceTensor(self._count, tuple(shape), dtype)
        if init is not None:
            if not (init.is_shared() and init.is_contiguous()):
                raise ValueError("alloc_tensor(init=...) requires a shared, contiguous tensor")
            self.copy_to(tensor.data_ptr, init.data_ptr(), init.nbytes)
        return tensor

    def copy_to(self, dst_dev_ptr, src_host_ptr, nbytes, *, worker_id=0):
        self._ask("copy", dst_dev_ptr, src_host_ptr, nbytes)

    def run(self, compiled, *args):
        described = []
        for arg in args:
            dtype = str(arg.dtype).removeprefix("torch.")
            if isinstance(arg, DeviceTensor):
                described.append(["device", arg.data_ptr, list(arg.shape), dtype])
            elif arg.is_shared():
                described.append(["host", arg.data_ptr(), list(arg.shape), dtype])
            else:
                raise TypeError("a host tensor must be shared memory")
        self._ask("run", self._programs.index(compiled), described)

    def close(self):
        self._ask("exit")
        os.wait()

    def _ask(self, *message):
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()
        answer = json.loads(self._file.readline())
        if answer is not None:
            raise RuntimeError(answer)


def _serve(sock, programs):
    file = sock.makefile("rw")
    memory = {}
    for line in file:
        kind, *rest = json.loads(line)
        answer = None
        try:
            if kind == "alloc":
                pointer, shape, dtype = rest
                # Fresh device memory is not zero.
                kind_ = getattr(torch, dtype)
                tensor = torch.empty(shape, dtype=kind_)
                tensor.view(-1).view(torch.uint8).fill_(255)
                memory[pointer] = tensor
            elif kind == "copy":
                pointer, source, count = rest
                base = max(p for p in memory if p <= pointer)
                target = memory[base].view(-1).view(torch.uint8)
                start = pointer - base
                target[start : start + count] = _host(source, [count], "uint8")
            elif kind == "run":
                index, args = rest
                with torch.inference_mode():
                    programs[index].program(
                        *(
                            memory[pointer] if where == "device" else _host(pointer, shape, dtype)
                            for where, pointer, shape, dtype in args
                        )
                    )
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        file.write(json.dumps(answer) + "\n")
        file.flush()
        if kind == "exit":
            break
    os._exit(0)


def _host(pointer, shape, dtype):
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(pointer)
    return torch.frombuffer(raw, dtype=kind, count=count).view(shape)

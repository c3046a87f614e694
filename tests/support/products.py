"""vLLM's oneDNN products on CPUs, whose handlers read a tensor when they are collected.

Garbage may be looked for while torch compiles in this process. There, in the middle of a fake tensor's dispatch, the
read fails, and its message reads the tensor again. Where that recurses too deep, the error holds a guard of torch's
(`torch._tensor_str._str`, torch 2.13), and once the error is freed the thread has that moment's dispatch keys for good:
torch calls no dispatch mode any more, and records no gradients. Two of CI's runs have failed by threads left so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import CPUDNNLGEMMHandler

read_by_vllm = CPUDNNLGEMMHandler.__del__
"""vLLM's own end of a handler (0.32)."""
_ended: list[Tensor | None] = []


def _keep(handler: Any) -> None:
    _ended.append(handler.handler_tensor)


def free_later() -> None:
    """Let handlers that are collected from here on wait for `free`."""
    CPUDNNLGEMMHandler.__del__ = _keep


def free() -> int:
    """Free what handlers held that were collected since the last call; return how many there were."""
    pointers = [tensor.item() for tensor in (_ended.pop() for _ in range(len(_ended))) if tensor is not None]
    for pointer in pointers:
        torch.ops._C.release_dnnl_matmul_handler(pointer)
    return len(pointers)

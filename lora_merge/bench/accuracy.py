"""Every element of a merged weight against float64, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.segments import raw

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements worked on at a time: temporaries of a few MiB on a CPU, of about 1 GiB on a GPU."""

# Bits of the fraction, and the exponent of the smallest normal number.
_FORMAT = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}


@dataclass
class Accuracy:
    """How far results lie from the exact ones.

    Attributes:
        max_ulp: largest distance from the correctly rounded result (nearest, ties to even), in steps between
            neighbouring numbers of the output dtype. Where base and update nearly cancel, a step is tiny against
            both, and float32 arithmetic shows as many steps.
        wrong: number of elements that are not correctly rounded.
        elements: number of elements looked at.
        of_bound: largest error as a fraction of what one rounding and float32 accumulation may leave,
            1/2 ulp(out) + 2^-23 (|W| + |out|) + 2^-20 |scaling| sum |B| |A|.
        squared: sum of the squared errors.
        squared_rounding: the same of the correctly rounded results.
    """

    max_ulp: int = 0
    wrong: int = 0
    elements: int = 0
    of_bound: float = 0.0
    squared: float = 0.0
    squared_rounding: float = 0.0

    @property
    def misrounded(self) -> float:
        return self.wrong / max(self.elements, 1)

    @property
    def x_rounding(self) -> float:
        """RMS error in multiples of the RMS error that one rounding leaves: 1.0 is as good as the dtype can be."""
        return math.sqrt(self.squared / self.squared_rounding) if self.squared_rounding else math.inf

    def __add__(self, other: Accuracy) -> Accuracy:
        """Return the figures of the elements of both."""
        return Accuracy(
            max(self.max_ulp, other.max_ulp),
            self.wrong + other.wrong,
            self.elements + other.elements,
            max(self.of_bound, other.of_bound),
            self.squared + other.squared,
            self.squared_rounding + other.squared_rounding,
        )


def compare(result: Tensor, base: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Accuracy:
    """Compare `result` `[out, in]` with float64 `base + scaling * lora_B @ lora_A`; all values are finite."""
    seen = Accuracy()
    a, b = lora_A.double(), lora_B.double()
    step = max(1, BLOCK[base.device.type] // base.shape[1])
    for i in range(0, base.shape[0], step):
        rows = slice(i, i + step)
        out, w = result[rows].double(), base[rows].double()
        exact = torch.addmm(w, b[rows], a, alpha=scaling)
        rounded = round_once(exact, result.dtype)
        steps = (_ordinal(result[rows]) - _ordinal(rounded)).abs_()
        size = torch.addmm(w.abs(), b[rows].abs(), a.abs(), beta=2**-23, alpha=2**-20 * abs(scaling))
        bound = size.add_(out.abs(), alpha=2**-23).add_(ulp(out, result.dtype), alpha=0.5)
        error, rounding = out.sub_(exact), rounded.double().sub_(exact)
        squared, squared_rounding = float(error.norm()) ** 2, float(rounding.norm()) ** 2
        of_bound = float(error.abs_().div_(bound).max())
        wrong = int(steps.count_nonzero())
        seen += Accuracy(int(steps.max()), wrong, steps.numel(), of_bound, squared, squared_rounding)
    return seen


def accuracy_of(comparisons: Sequence[Callable[[], Accuracy]], device: torch.device) -> Accuracy:
    """Return the sum of all comparisons. On a CPU each has a thread of its own: small operations on all threads would
    wait for the slowest one at every step."""
    threads = torch.get_num_threads()
    workers = threads if device.type == "cpu" else 1
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return sum(pool.map(lambda compare: compare(), comparisons), Accuracy())
    finally:
        torch.set_num_threads(threads)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round finite float64 to `dtype`, to nearest, ties to even.

    Beside a constant whose last bit weighs one ulp of the result, the float64 adder rounds there; taking the constant
    off again is exact.
    """
    constant = ulp(x, dtype).mul_(1.5 * 2**52)
    return (x + constant).sub_(constant).to(dtype)


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the step between neighbouring numbers of `dtype` at finite float64 `x`, float64."""
    fraction, lowest = _FORMAT[dtype]
    exponent = (x.view(torch.int64) >> 52).bitwise_and_(0x7FF).clamp_(min=lowest + 1023)
    return exponent.sub_(fraction).bitwise_left_shift_(52).view(torch.float64)


def _ordinal(x: Tensor) -> Tensor:
    """Map numbers in order to integers, neighbours one apart, both zeros at 0: int32 (int64 for float32)."""
    bits = raw(x).int() if x.element_size() == 2 else raw(x).long()
    return torch.where(bits < 0, -(bits & torch.iinfo(raw(x).dtype).max), bits)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit: NaN equals itself, -0.0 differs from 0.0."""
    return torch.equal(raw(x), raw(y))

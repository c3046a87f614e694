"""Cosines and sines that are alike in every process, from its first call on.

PyTorch computes them with oneMKL (2024.2), which looks for the kernel of a function when it is first called. Where
several threads make that call together, now and then one of them runs a kernel that is off by 1.5e-4, for its part of
the elements and that once (pytorch/pytorch#188792). vLLM computes the cosines of all positions as it starts, two
threads a half each, and keeps them: one start in a thousand, more of them on a busy machine, answers with log-probs
that are 1e-5 off in that half, whatever is pushed. A call on one thread settles which kernel it is.
"""

from __future__ import annotations

import torch

for function in (torch.cos, torch.sin):
    function(torch.ones(1))


class Settled:
    """Extends vLLM's workers, each of which imports this module before it makes its model."""

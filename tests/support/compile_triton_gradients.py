"""Compiles the Triton kernels of gradients for Hopper without a GPU. Run by test_triton_gradients.py."""

from __future__ import annotations

from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_merge.kernels.triton import gradient_kernels, gradients

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
SHARED = 227 << 10
"""Bytes that a block may have there."""


def main() -> None:
    kinds = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
    for (activations, factors), rank in product(kinds, (8, 128, 256)):
        parts = gradients.parts_of(activations, factors)
        depth, options = gradients.shape_of(rank, parts)
        tiles = {"TILE_T": gradients.TILE, "TILE_K": depth}, {"TILE_N": gradients.TILE, "TILE_T": depth}
        for kernel, tile in zip((gradient_kernels.down, gradient_kernels.up), tiles, strict=True):
            names = kernel.arg_names
            constants = {name: value for name, value in (options | tile).items() if name in names}
            types = {"x": NAMES[activations], "dy": NAMES[activations]}
            types |= {"lora_A": NAMES[factors], "lora_B": NAMES[factors]} | dict.fromkeys(
                ("p", "q", "dA", "dB"), "*fp32"
            )
            types |= dict.fromkeys(("tokens", "share", "columns", "rows", "rank"), "i32")
            types |= dict.fromkeys(("x_stride", "dy_stride"), "i64")
            signature = {name: types.get(name, "constexpr") for name in names}
            aligned = {
                (number,): [["tt.divisibility", 16]]
                for number, name in enumerate(names)
                if signature[name] != "constexpr" and name not in ("tokens", "share", "rank")
            }
            values = {(names.index(name),): value for name, value in constants.items()}
            source = ASTSource(kernel, signature, values, aligned)
            compiler = {name: options[name] for name in ("num_stages", "num_warps")}
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=compiler)
            assert made.asm["cubin"]
            assert made.metadata.shared <= SHARED, f"{kernel.__name__}, rank {rank}: {made.metadata.shared} bytes"
            assert ("mma" in made.asm["ptx"]) == (parts > 0), f"{kernel.__name__}: matrix unit"


if __name__ == "__main__":
    main()

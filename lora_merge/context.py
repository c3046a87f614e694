"""`merged(model)`: the adapters in the base weights for the time of a `with` block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from .choices import Strategy, check_choice
from .merged_block import MergedBlock
from .models.frozen import warn_if_frozen
from .models.peft.chosen import check_names
from .shards.exchange import check_strategy

Model = TypeVar("Model")


@contextmanager
def merged(
    model: Model,
    *,
    adapter_names: Sequence[str] | None = None,
    strategy: Strategy | None = None,
    restore: Literal["exact"] | None = None,
) -> Iterator[Model]:
    """Merge the active adapters into the base weights for the time of a `with` block, and restore every bit after it.

        with lora_merge.merged(model):
            model.generate(input_ids=prompt, max_new_tokens=16)

    Inside the block the base weights hold `round(W + scaling * lora_B @ lora_A)` and the adapters add nothing on top.
    After the block, also when it raises, every parameter and buffer is bit for bit what it was. Adapters are merged as
    they stand: live scalings, several at once (rounded once), DoRA, `lora_bias`, fused experts. Weights stay at their
    addresses, so compiled modules stay valid, and CUDA graphs that were captured inside a block. `requires_grad`,
    gradients, optimizer state and PEFT's flags are not touched.

    What recorded the forward before the block (a CUDA graph, `torch.jit.trace`, `torch.export`) has the adapters in it
    and adds them once more inside; docs/compile.md. Let no forward run in another thread while a block is entered or
    left.

    Train outside of the block, or keep forward and backward both inside: autograd refuses a backward pass that crosses
    the border. `save_pretrained` and the like are refused inside, on the model and on its parts; `state_dict()` is not,
    and holds merged values under the adapted model's names.

    Sharded models (FSDP2, FSDP1, DeepSpeed ZeRO-3, Megatron): call it on every rank. Each rank merges what it holds,
    and only parts of adapters cross between ranks. Units that are gathered at the moment are resharded at entry and
    exit.

    Time: a merge at entry and one at exit; each waits once for the device (of float16 twice at entry: values beyond
    65504 are refused). Memory while inside: 2 bits for each element
    of the adapted weights, and what rounding moved further than one step; together 0.15 of the bytes of a bf16 weight
    and 0.08 of a float32 one for updates up to a tenth of the weights, 0.25 of a bf16 one for updates of their size, at
    most 1.14. From the first entry on also a copy of the adapters, so that they may be trained or replaced inside. A
    tied weight takes one or two copies of itself. How it works: docs/restore.md.

    Do not write to merged weights inside. Such a write is found by a checksum at exit (`NotRestored`). A parameter that
    was moved (`parameter.data = ...`) gets the base where it is now. Work on merged weights by other CUDA streams must
    be waited for before the block ends.

    Args:
        model: a `PeftModel`, any module that holds PEFT's LoRA layers, a `DeepSpeedEngine`, or the list of chunks of a
            megatron-core model (or `lora_merge.megatron.Chunks`).
        adapter_names: of PEFT's adapters: exactly these are merged, and the others do not act inside. Default: those
            that act (`set_adapter`).
        strategy: None merges weights where they lie. "unshard" gathers sharded weights, merges them whole and cuts them
            again, bucket by bucket: the same bits, for their bytes over the network; and it keeps a plain copy of the
            weights instead of 2 bits an element.
        restore: deprecated; leave it out. It had one legal value, "exact".

    Yields:
        `model`.

    Raises:
        InvalidInput: an unknown option or adapter, no LoRA layers, a weight that does not fit, ranks that disagree, or
            a stream (`MergedWeights`, `VllmSync`) of these weights that is under way. On every rank, before anything is
            written. Or merged values of float16 that are infinite or NaN where the base is not: on every rank, once the
            base is back.
        UnsupportedAdapter: an adapter without an exact merge; names the module and the reason. As above.
        AlreadyMerged: the weights hold adapters already, or the model is inside `merged` now. As above.
        NotRestored: at exit, on the rank that finds it: merged weights were written inside, their memory was given
            back, or another Parameter took their place. Names them; all others are restored.
    """
    if restore is not None:
        check_choice("restore", restore, Literal["exact"])
        warnings.warn("merged(restore='exact') is the only way: leave it out", DeprecationWarning, stacklevel=3)
    check_strategy(strategy)
    block = MergedBlock(model, adapter_names=check_names(adapter_names), strategy=strategy)
    warn_if_frozen()
    try:
        block.enter()
        yield model
    finally:
        try:
            block.leave()
        except BaseException:  # an interrupt may come before the first line of a function
            block.leave()
            raise

"""The dry run of what an engine's model computes of its weights as it loads them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lora_merge.engine.worker.loader import Loader
from lora_merge.engine.worker.modules import Modules
from lora_merge.stream.buckets import Meta, extent, lay_out


class Norm(nn.Module):
    """As SGLang's of Gemma: what it computes with is made of the weight as that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("plus_one", torch.ones(8), persistent=False)


class Listing(nn.Module):
    """Takes all weights before it loads the first one, so that nobody sees which one is being loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.plain = nn.Linear(8, 8, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in list(weights):
            module = self.get_submodule(name.removesuffix(".weight"))
            module.weight.data.copy_(tensor)
            if isinstance(module, Norm):
                torch.add(module.weight.data, 1.0, out=module.plus_one)


def test_what_is_computed_of_a_weight_is_computed_again() -> None:
    model = Listing()
    loader = Loader(Modules(model), torch.device("cpu"))
    stream = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    table = lay_out([Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream.items()], 1 << 20)
    found = loader.examine("digest", table)
    assert not found.answer.refused
    assert not found.answer.missing
    assert found.staged == {f"norms.{number}.weight" for number in range(3)}
    assert set(found.copies) == {"plain.weight"}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, before[name]), "a dry run changes nothing"
    loader.begin(found)
    for index, slots in enumerate(table):
        data = torch.empty(extent(slots), dtype=torch.uint8)
        for slot in slots:
            slot.view(data).copy_(stream[slot.name])
        loader.load(found, index, slots, data, lambda name, tensor: None)
    loader.finish()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stream[name])
    for norm in model.norms:
        assert torch.equal(norm.plus_one, norm.weight + 1)

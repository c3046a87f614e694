"""Public options of fixed words have types that say which: editors offer them, and type checkers find a wrong one."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import lora_merge
from lora_merge import InvalidInput, choices
from lora_merge.integrations.options import Options
from lora_merge.kernels.checks import check_dtype

FREE = {"base", "folder", "hottest", "key", "name", "path", "part", "device", "max_shard_size", "shard_size", "tenant"}
"""Options that take any text."""
RESULTS = {"Delta", "Saved", "SyncReport"}
"""Classes that no user makes objects of."""
WORDS = {
    "cache": choices.Cache,
    "mode": choices.Mode,
    "merge": choices.Merge,
    "pause": choices.Pause,
    "rounding": choices.Rounding,
    "strategy": choices.Strategy,
    "tokenizer": choices.Tokenizer,
    "train": choices.Train,
}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all that a user calls, methods too."""
    modules = [lora_merge, lora_merge.serve, lora_merge.verify, lora_merge.restore, lora_merge.megatron]
    for module in modules:
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in names:
            found = getattr(module, name)
            if isinstance(found, ModuleType) or not getattr(found, "__module__", "").startswith("lora_merge"):
                continue
            if not inspect.isclass(found):
                yield name, found
            elif not issubclass(found, Exception) and name not in RESULTS:
                yield name, found.__init__
                for inner, method in inspect.getmembers(found, inspect.isfunction):
                    if not inner.startswith("_"):
                        yield f"{name}.{inner}", method
    yield "Options", Options.__init__


@pytest.mark.parametrize(("where", "function"), [pytest.param(*found, id=found[0]) for found in public()])
def test_words_are_literals(where: str, function: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(inspect.unwrap(function))
    for name in set(hints).intersection(WORDS):
        kind = hints[name]
        if kind is Any:  # an object
            continue
        words = [arg for arg in (kind, *get_args(kind)) if get_origin(arg) is Literal]
        assert words == [WORDS[name]], f"{where}({name}=)"
    for name, kind in hints.items():
        plain = kind is str or str in get_args(kind)
        default = inspect.signature(function).parameters.get(name)
        optional = default is not None and default.default is not inspect.Parameter.empty
        assert not (plain and optional) or name in FREE, f"{where}({name}=)"


@pytest.mark.parametrize(("name", "dtype"), choices.DTYPES.items())
def test_dtypes_by_name(name: str, dtype: torch.dtype) -> None:
    assert check_dtype(name) is check_dtype(f"torch.{name}") is check_dtype(dtype) is dtype
    assert name in get_args(get_args(choices.DType)[1])
    weight, lora_A, lora_B = torch.randn(4, 6), torch.randn(2, 6), torch.randn(4, 2)
    typed: Any = name
    assert lora_merge.merge(weight, lora_A, lora_B, 1.0, dtype=typed).dtype == dtype


def test_what_is_no_name() -> None:
    with pytest.raises(InvalidInput, match="dtype must be bfloat16, float16 or float32, got 'half'"):
        check_dtype("half")
    with pytest.raises(InvalidInput, match=r"mode must be one of merged, adapter, got 'both' \(or LORA_MERGE_MODE\)"):
        Options(mode="both")  # type: ignore[arg-type]

"""The pages for trainers do what they say, on real PEFT models; blocks that need vLLM run in test_vllm_grpo.py. What
other pages take from the package is there, under the names and keywords that they use."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from docs_code import (
    DOCS,
    PAGES,
    ROOT,
    anchors_of,
    links_of,
    messages_of,
    named_files,
    named_in,
    names_of,
    resolve,
    unimported,
    uses,
)
from torch import Tensor, nn

import lora_merge
from lora_merge.integrations.options import SETTINGS


def merged_weights(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """HF names and merged weights, without the stream: `merge` for each LoRA layer, everything else as it is."""
    wanted = {}
    for name, tensor in model.get_base_model().state_dict().items():
        if ".lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            owner = model.get_base_model().get_submodule(name.removesuffix(".base_layer.weight"))
            A, B = owner.lora_A["default"].weight, owner.lora_B["default"].weight
            tensor = lora_merge.merge(tensor, A, B, owner.scaling["default"], dtype=dtype)
        wanted[name.replace(".base_layer.", ".")] = tensor.to(dtype or tensor.dtype)
    return wanted


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


class PackingRollout:
    """A rollout with a sender as verl has: tensors are packed back to back into one buffer of a fixed size, which is
    shipped and used again; the receiver copies out of it."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8)
        self.awake: list[str] = []
        self.received: dict[str, Tensor] = {}

    async def resume(self, tags: list[str]) -> None:
        self.awake += tags

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], **options: Any) -> None:
        assert options == {"peft_config": None, "base_sync_done": True}
        used, table = 0, []
        for name, tensor in weights:
            if used + tensor.nbytes > self.buffer.numel():
                await self.ship(table)
                used, table = 0, []
            self.buffer[used : used + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            table.append((name, tensor.dtype, tensor.shape, used))
            used += tensor.nbytes
        await self.ship(table)

    async def ship(self, table: list[Any]) -> None:
        await asyncio.sleep(0)
        for name, dtype, shape, start in table:
            assert name not in self.received, f"{name} came twice"
            data = self.buffer[start : start + shape.numel() * dtype.itemsize].clone()
            self.received[name] = data.view(dtype).view(shape)


def test_verl_worker_with_a_packing_sender() -> None:
    model = models.with_lora(models.qwen2)
    worker = names_of("verl.md")["ActorRolloutWorker"](model, PackingRollout(1 << 14))
    for step in range(2):
        worker.rollout = PackingRollout(1 << 14)
        asyncio.run(worker.update_weights())
        assert worker.rollout.awake == ["weights", "kv_cache"]
        assert_same(worker.rollout.received, merged_weights(model, torch.bfloat16))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 0.01 * (step + 1) * ("lora_" in name)


def test_verl_buckets_as_they_are() -> None:
    model, names, received = models.with_lora(models.qwen2), names_of("verl.md"), {}

    def send(table: list[Any], data: Tensor) -> None:
        received.update(names["receive_bucket"](table, data.clone()))

    names["send_weights"](lora_merge.MergedWeights(model, bucket_bytes=1 << 14), send)
    assert_same(received, merged_weights(model))


def test_trl_generation_by_the_training_model() -> None:
    model, prompts = models.with_lora(models.qwen2), models.tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(prompts, **options)
    assert torch.equal(names_of("trl.md")["generate"](model, prompts, **options), wanted)
    assert_same(dict(model.state_dict()), before)


def test_trl_loader() -> None:
    model, received = models.with_lora(models.qwen2), {}

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        received.update(weights)

    names_of("trl.md")["sync_weights"](model, load_weights)
    assert_same(received, merged_weights(model))


def test_trl_check_of_the_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    check, trainer = names_of("trl.md")["check"], torch.randn(3, 9)
    rollout = trainer[:, 3:8].clone()  # prompts of 4 tokens: the first answer token is about entry 3
    check(trainer, rollout, 4, [5, 2, 4])
    assert "importance ratio 1.0000 to 1.0000" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        check(trainer, rollout - 0.1, 4, [5, 2, 4])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_names_and_keywords(page: Path) -> None:
    """Code that no test runs (FSDP, Megatron and vLLM in README, samples of other pages) compiles, and calls what there
    is, by a signature that takes it; so does what is named in a sentence."""
    text = page.read_text()
    for name in named_in(text):
        resolve(name)
    for block, calls in uses(text):
        compile(block, page.name, "exec")
        assert calls or "lora_merge" not in block, block


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_code_imports_what_it_takes(page: Path) -> None:
    assert not set(unimported(page.read_text()))


def test_the_check_of_names_and_keywords() -> None:
    """It sees what README's blocks for FSDP and vLLM do, and finds what is not there."""
    readme = (ROOT / "README.md").read_text()
    calls = [call for _, block in uses(readme) for call in block]
    wanted = {"lora_merge.merged(model)", "weights.describe()", "sync.push()", "lora_merge.VllmSync(model, llm)"}
    assert wanted <= set(calls)
    for wrong in ("lora_merge.merge_(w, a, b, scale=2)", "lora_merge.absent(1)", "from lora_merge import absent"):
        with pytest.raises((TypeError, AttributeError)):
            list(uses(f"```python\n{wrong}\n```\n"))


def test_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text().split())
    assert words <= 1200, f"README.md has {words} words: what is not for the first minute belongs on a page of docs/"


def test_examples_of_docstrings() -> None:
    """Examples in docstrings call what there is, by a signature that takes it."""
    seen = []
    for file in sorted((ROOT / "lora_merge").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for _, calls in uses((ast.get_docstring(node) or "") + "\n"):
                    seen += calls
    assert {"lora_merge.save_merged(model, 'merged', tokenizer=tokenizer)", "sync.push()"} <= set(seen)


def test_links() -> None:
    """Links and pictures of pages lead to files that are there, and to headings that they have."""
    for page in PAGES:
        for target, anchor in links_of(page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors_of(file.read_text()), f"{page.name}: {target}#{anchor}"


def test_the_check_of_links() -> None:
    assert list(links_of("[a](b.md#c) ![d](e.png) [f](https://g) `[h](i)`")) == [("b.md", "c"), ("e.png", "")]
    assert anchors_of("# What it *is*, in `code`\n## Two") == {"what-it-is-in-code", "two"}


def test_figures_of_readme() -> None:
    """README's table says what the records say."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "pictures.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each picture is drawn from the records, and shown by a page."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pictures = __import__("pictures")
    text = "".join(page.read_text() for page in PAGES)
    assert {file.name for file in pictures.IMAGES.glob("*.png")} == pictures.PICTURES.keys()
    for name, draw in pictures.PICTURES.items():
        assert f"images/{name})" in text, f"no page shows {name}"
        draw(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    modules, errors = {"megatron", "restore", "serve", "verify"}, vars(lora_merge.errors).keys()
    for name in set(lora_merge.__all__) - modules - errors:
        assert f"::: lora_merge.{name}\n" in text, f"docs/api.md lacks ::: lora_merge.{name}"
    for owner in ("restore", "serve", "megatron"):
        for name in getattr(lora_merge, owner).__all__:
            assert f"lora_merge.{owner}.{name}" in text, f"{owner}.{name}"


def test_environment_has_every_variable() -> None:
    """Variables that the package or its build reads are on the page, and no others."""
    sources = [*(ROOT / "lora_merge").rglob("*.py"), *(ROOT / "csrc" / "cpu").glob("*.cpp"), ROOT / "setup.py"]
    text = "".join(source.read_text() for source in sources)
    read = set(re.findall(r'(?:environ|getenv|ENVIRONMENT|within)\W.{0,12}"(LORA_MERGE_\w+)"', text))
    read |= {f"LORA_MERGE_{name}" for name in re.findall(r"\{SWITCH\}_([A-Z]+)\b", text)}
    listed = set(re.findall(r"^\| `(LORA_MERGE_\w+)`", (DOCS / "environment.md").read_text(), flags=re.MULTILINE))
    assert read == listed, f"docs/environment.md: {sorted(read ^ listed)}"
    assert listed == {f"LORA_MERGE_{name}" for name in SETTINGS}


def test_messages_of_troubleshooting() -> None:
    """What the page tells a reader to search for is what the package says."""
    said = messages_of(ROOT / "lora_merge")
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    for row in rows:
        if re.search(r"\((torch|PEFT)'s\)", row):
            continue
        for quoted in re.findall(r"`([^`]+)`", row):
            for part in filter(None, (part.strip(" :;") for part in quoted.split("..."))):
                assert part in vars(lora_merge.errors) or any(part in text for text in said), part


def test_pages_and_records_are_there() -> None:
    """Files that a page names: other pages, records, pictures, scripts."""
    for page in PAGES:
        for name in named_files(page.read_text()):
            assert list(ROOT.glob(name)) or list((ROOT / "benchmarks").glob(name)), f"{page.name}: {name}"

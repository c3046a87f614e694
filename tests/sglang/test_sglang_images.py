"""Models that see images in a real SGLang engine: merged pushes, with adapters on the tower, too. Answers to a text and
to images are those of transformers, also where the engine has seen an image before the push."""

from __future__ import annotations

import asyncio
import copy
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import images
import policies
import pytest
import sglang_engines
import torch
from peft import LoraConfig, get_peft_model
from sglang_engines import GREEDY, ado, engine
from torch import Tensor, nn

from lora_merge import PushRefused, SglangSync
from lora_merge.engine.sglang import internals

no_leftovers = sglang_engines.no_leftovers
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
TOWER = r".*visual.*\.(qkv|proj|down_proj|linear_fc1|mlp\.0)"
OPTIONS = {"skip_tokenizer_init": False, "load_format": "auto"}
TOLERANCE = 2e-5
"""As of `assert_answers`; the tower's roundings come on top."""


@dataclass
class Seeing:
    """An engine, the base that it was started with, and what makes inputs of images."""

    kind: str
    base: nn.Module
    started: Any

    def __post_init__(self) -> None:
        self.processor = images.processor(self.kind)
        self.asked = [*images.images(2), None]

    def adapted(self, targets: str) -> Any:
        config = LoraConfig(r=4, lora_alpha=6, target_modules=targets)
        model = get_peft_model(copy.deepcopy(self.base), config).eval()
        policies.train(model)
        return model

    def text(self, image: Any) -> str:
        content = [*([{"type": "image"}] if image else []), {"type": "text", "text": "What is this?"}]
        message = {"role": "user", "content": content}
        return str(self.processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True))

    def ask(self) -> list[Any]:
        """Ask for two images, and a text, one after the other.

        SGLang 0.5.15 drops what a request of a batch waits for if it ends while later images are still prepared:
        KeyError (its pull request 36638).
        """
        return [self.answer(image) for image in self.asked]

    def answer(self, image: Any) -> Any:
        image_data = None if image is None else [image]
        return self.started.generate(
            prompt=self.text(image), image_data=image_data, sampling_params=GREEDY, return_logprob=True
        )

    def logp(self, model: nn.Module, image: Any, answer: list[int]) -> Tensor:
        """Log-probs of all tokens at each place of an answer, by transformers."""
        images_of = {"images": [image]} if image else {}
        given = self.processor(text=[self.text(image)], **images_of, return_tensors="pt", return_mm_token_type_ids=True)
        ids = torch.cat([given.pop("input_ids"), torch.tensor([answer])], 1)
        kinds = nn.functional.pad(given.pop("mm_token_type_ids"), (0, len(answer)))
        given.pop("attention_mask")
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, **given).logits
        return logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)

    def assert_answers(self, model: nn.Module) -> list[Any]:
        """Check that greedy tokens and their log-probs are the model's."""
        outputs = self.ask()
        for image, output in zip(self.asked, outputs, strict=True):
            answer = list(output["output_ids"])
            logp = self.logp(model, image, answer)
            assert logp.argmax(-1).tolist() == answer, (image, answer)
            assert (logprobs(output) - chosen(logp, answer)).abs().max() < TOLERANCE, image
        return outputs


def merged(model: Any) -> Any:
    """A merged copy. Beside the factors the forward's own roundings would take most of the tolerance."""
    return copy.deepcopy(model).merge_and_unload()


def logprobs(output: Any) -> Tensor:
    return torch.tensor([float(one) for one, *_ in output["meta_info"]["output_token_logprobs"]])


def chosen(logp: Tensor, answer: list[int]) -> Tensor:
    return logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_models_that_see_images(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the old tower answers; and an engine that starts with the merged checkpoint says the same."""
    # SGLang without compiled kernels would have this process make patches of images on a GPU.
    monkeypatch.setattr("sglang.srt.multimodal.processors.base_processor._is_cpu", not torch.cuda.is_available())
    folder = images.checkpoint(kind, tmp_path / "base")
    base = images.model(kind).eval()
    with engine(base, folder, **OPTIONS) as started:
        seeing = Seeing(kind, base, started)
        seeing.assert_answers(base)
        for targets, merge in ((LANGUAGE, "trainer"), (TOWER, "trainer"), (TOWER, "engine")):
            images_that_were_seen(seeing, targets, merge)
        a_request_in_flight(seeing)
        model = adapters_are_for_merged_mode(seeing)
        pushed = seeing.assert_answers(model)
    model.save_pretrained(tmp_path / "merged")
    seeing.processor.save_pretrained(tmp_path / "merged")
    with engine(model, tmp_path / "merged", **OPTIONS) as started:
        fresh = Seeing(kind, base, started).ask()
    for old, new in zip(pushed, fresh, strict=True):
        assert old["output_ids"] == new["output_ids"]
        assert (logprobs(old) - logprobs(new)).abs().max() < TOLERANCE


def images_that_were_seen(seeing: Seeing, targets: str, merge: str) -> None:
    """Before a push of what is trained, and after it."""
    model = seeing.adapted(targets)
    with closing(SglangSync(model, seeing.started, merge=merge)) as sync:
        before = seeing.ask()
        for seed in range(2):
            assert sync.push(verify=True).coverage == 1
            after = seeing.assert_answers(merged(model))
            for image, old, new in zip(seeing.asked, before, after, strict=True):
                same = old["output_ids"] == new["output_ids"]
                moved = not same or (logprobs(old) - logprobs(new)).abs().max() > 1e-3
                assert moved or image is None, "what is trained has a say on images"
            before = after
            policies.train(model, seed + 2)


def a_request_in_flight(seeing: Seeing) -> None:
    """What a push keeps goes on with what the new tower sees."""
    model = seeing.adapted(TOWER)
    sync = SglangSync(model, seeing.started)
    sync.push()
    old, image = merged(model), seeing.asked[0]
    policies.train(model, 7)

    async def scenario() -> Any:
        await ado(seeing.started, "slow", 0.05)
        stream = await seeing.started.async_generate(
            prompt=seeing.text(image), image_data=[image], return_logprob=True, stream=True,
            sampling_params=GREEDY | {"max_new_tokens": 40},
        )  # fmt: skip
        pushing = None
        async for output in stream:
            pushing = pushing or asyncio.ensure_future(sync.apush())
            last = output
        assert pushing is not None
        await pushing
        await ado(seeing.started, "slow", 0)
        return last

    output = seeing.started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    answer, new = list(output["output_ids"]), merged(model)
    by_old, by_new = (
        ((logprobs(output) - chosen(seeing.logp(one, image, answer), answer)).abs() < TOLERANCE).tolist()
        for one in (old, new)
    )
    assert len(answer) == 40
    assert any(all(by_old[:n]) and all(by_new[n:]) for n in range(1, 40)), (by_old, by_new)
    seeing.assert_answers(new)
    sync.close()


def adapters_are_for_merged_mode(seeing: Seeing) -> Any:
    """Return the merged model that the engine holds then."""
    model = seeing.adapted(rf"{LANGUAGE}|{TOWER}")
    sync = SglangSync(model, seeing.started)
    sync.push()
    held = sync.states()
    with pytest.raises(PushRefused, match=r'cannot take an adapter: it serves a multimodal model.*mode="merged"'):
        sync.push(mode="adapter")
    assert sync.states() == held
    sync.close()
    return merged(model)


def test_a_release_that_keeps_encoded_images_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an engine is refused if it sees images."""
    monkeypatch.setattr(internals, "_EMBEDDING_CACHES", ("sglang.srt.managers.mm_utils.moved",))
    for sees in (False, True):
        scheduler = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=sees))
        lacks = internals.lacks(SimpleNamespace(scheduler=scheduler))
        assert ("sglang.srt.managers.mm_utils.moved" in lacks) is sees

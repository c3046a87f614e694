"""What vLLM keeps of the old weights beside them (docs/caches.md): a push resets it, or is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import caching_connectors
import engines
import models
import pytest
import torch
from engines import GREEDY, assert_answers, engine, train
from vllm import EngineArgs
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.engine.vllm import unfit

no_leftovers = engines.no_leftovers
PROMPT = [(7 * i + 3) % 251 for i in range(40)]
"""Longer than a block."""


def connector(name: str, store: Path, **more: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(store)}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra} | more


def forgetful(store: Path) -> dict[str, Any]:
    return connector("Forgetful", store, kv_connector_module_path="caching_connectors")


def ask(llm: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)


@pytest.fixture(autouse=True)
def no_connectors() -> Iterator[None]:
    """vLLM leaves those of an engine in this process to the next one."""
    yield
    ensure_kv_transfer_shutdown()


@pytest.fixture
def policy() -> Any:
    return models.with_lora(engines.qwen2, target_modules=engines.LINEARS)


@pytest.fixture
def base(policy: Any, tmp_path: Path) -> Path:
    engines.save_base(policy.get_base_model(), tmp_path / "base")
    return tmp_path / "base"


def test_a_connector_that_does_not_forget_hides_in_another(policy: Any, base: Path, tmp_path: Path) -> None:
    """Each one inside is looked at; nothing is written, and the engine goes on."""
    inside = [forgetful(tmp_path / "blocks"), connector("ExampleConnector", tmp_path / "blocks")]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": inside}
    )
    with engine(policy, base, load_format="auto", kv_transfer_config=config, block_size=32) as llm:
        sync = VllmSync(policy, llm)
        before = sync.states()
        with pytest.raises(PushRefused, match=r"KV connector \(ExampleConnector\) that forgets nothing.*without it"):
            sync.push()
        assert sync.states() == before
        with policy.disable_adapter():
            assert_answers(ask(llm), policy, [PROMPT])


def test_a_connector_that_forgets(policy: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to; where it says that it could not, or raises, the push has failed."""
    store = tmp_path / "blocks"
    store.mkdir()
    config = KVTransferConfig(**forgetful(store))
    with engine(policy, base, kv_transfer_config=config, block_size=32) as llm:
        sync = VllmSync(policy, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(policy, step)
            sync.push()
            assert_answers(ask(llm), policy, [PROMPT])
            assert [*store.iterdir()], "the connector has blocks that could answer after the next push"
        for says, word in ((False, r"KV connector \(Forgetful\) said"), (OSError("no store"), "no store")):
            train(policy, 2)
            monkeypatch.setattr(caching_connectors.Forgetful, "says", says)
            with pytest.raises(PushFailed, match=f"engine 0 is dirty: .*{word}"):
                sync.push()
            assert sync.states()[0].kind == "dirty"
        monkeypatch.undo()
        sync.push()
        assert_answers(ask(llm), policy, [PROMPT])


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, ""),
    "uva": ({"cpu_offload_gb": 1}, r"host's memory \(cpu_offload_gb=1"),
    "prefetch": ({"offload_group_size": 2}, r"host's memory \(offload_group_size=2"),
    "of the other backend": ({"offload_group_size": 2, "offload_backend": "uva"}, ""),
    "a daemon's weights": ({"load_format": "ipc_cache"}, "same memory to other engines"),
    "encoders": (
        {"ec_transfer_config": ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")},
        "through ECExampleConnector .*ec_transfer_config",
    ),
    "prefill": (
        {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_producer")},
        "prefill and decode apart .*kv_producer",
    ),
    "constants": (
        {"compilation_config": {"inductor_compile_config": {"max_autotune": True}}},
        "weights in as constants .*max_autotune",
    ),
    "a classifier": ({"runner": "pooling", "convert": "classify"}, ""),
    "a classifier of tokens": (
        {
            "runner": "pooling",
            "convert": "classify",
            "hf_overrides": {"method": "no_post_processing", "classifier_from_token": ["a", "b"]},
        },
        "its classifier of rows of a head .*classifier_from_token",
    ),
}


@pytest.mark.filterwarnings("ignore:.*offload fields are set")
@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_vllm(base: Path, name: str) -> None:
    """(vLLM's own configuration; what they ask for, a CPU cannot start.)"""
    options, word = CONFIGS[name]
    config = EngineArgs(str(base), skip_tokenizer_init=True, **options).create_engine_config()
    worker = SimpleNamespace(
        vllm_config=config,
        model_config=config.model_config,
        parallel_config=config.parallel_config,
        device=torch.device("cpu"),
        model_runner=SimpleNamespace(),
    )
    found = unfit.first(unfit._REFUSED, worker)
    assert bool(found) == bool(word), found
    assert re.search(word, found), found


@pytest.mark.parametrize(
    ("kind", "extra", "word"),
    [
        ("offloading_connector.OffloadingConnector", {}, ""),
        ("offloading_connector.OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, "TieringOffloadingSpec"),
        ("simple_cpu_offload_connector.SimpleCPUOffloadConnector", {}, ""),
        ("mooncake.store.connector.MooncakeStoreConnector", {}, "store for several engines"),
        ("nixl.NixlConnector", {}, "forgets nothing"),
        ("lmcache_connector.LMCacheConnectorV1", {}, "forgets nothing"),
        ("decode_bench_connector.DecodeBenchConnector", {}, "forgets nothing"),
    ],
)
def test_vllms_own_connectors(kind: str, extra: dict[str, Any], word: str) -> None:
    """(The classes; most want a GPU, or a library, to be made.)"""
    module, _, name = kind.rpartition(".")
    found = getattr(pytest.importorskip(f"vllm.distributed.kv_transfer.kv_connector.v1.{module}"), name)
    one = found.__new__(found)
    one._kv_transfer_config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
    why = unfit._outlasts(one)
    assert word in why
    assert bool(why) == bool(word)


def test_a_store_that_several_engines_fill() -> None:
    """LMCache's own connector, which vLLM takes from LMCache's package (0.5.6: it asks its server to forget, which
    empties the first tier), or a class made of it."""
    theirs = type("LMCacheMPConnector", (caching_connectors.Forgetful,), {})
    for kind in (theirs, type("Ours", (theirs,), {})):
        assert "store for several engines" in unfit._outlasts(kind.__new__(kind))


WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<fake_token_around_image>", "<end_of_utterance>"]


def looks() -> Any:
    """A vision tower that is seen in the answers."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = engines.SIZES | {"model_type": "llama", "vocab_size": 288, "pad_token_id": 0}
    settings = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=260, scale_factor=2, tie_word_embeddings=False
    )
    model = Idefics3ForConditionalGeneration(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("vision" in name or "connector" in name):
                parameter.normal_(std=0.2)
    return model


def processor() -> Any:
    """Bytes as tokens, and images as they are."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    known = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    known |= {word: 256 + i for i, word in enumerate([*WORDS, "<global-img>"])}
    tokenizer = Tokenizer(kinds.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=[*WORDS[4:], "<global-img>"],
    )  # fmt: skip
    size = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    return Idefics3Processor(images, fast, image_seq_len=4, chat_template="")


def stepped(llm: Any) -> Iterator[Any]:
    """The requests that end as an engine is stepped until nothing is left."""
    while llm.llm_engine.has_unfinished_requests():
        yield from (output for output in llm.llm_engine.step() if output.finished)


def test_images_that_were_seen_before(tmp_path: Path) -> None:
    """What the tower made of them is forgotten. Inputs, as the processor left them, are not: a request that refers to
    one in vLLM's cache is answered after a push (in shared memory its bytes may be others by then, and the engine
    ended)."""
    from PIL import Image

    model = models.with_lora(looks, target_modules=["q_proj", "v_proj", "fc1"])
    engines.save_base(model.get_base_model(), tmp_path / "base")
    reads = processor()
    reads.save_pretrained(tmp_path / "base")
    images = [Image.effect_mandelbrot((32, 32), (-2 + i, -1.5, 1, 1.5), 50).convert("RGB") for i in range(2)]
    text = "<image>what is that"

    def prompt(image: Any) -> dict[str, Any]:
        return {"prompt": text, "multi_modal_data": {"image": image}}

    def assert_seen(output: Any, image: Any) -> None:
        with torch.no_grad():
            right = model(**reads(text=[text], images=[[image]], return_tensors="pt")).logits[0, -1]
        token, found = next(iter(output.outputs[0].logprobs[0].items()))
        assert abs(found.logprob - right.float().log_softmax(-1)[token].item()) < 1e-4

    options = {"skip_tokenizer_init": False, "mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0.1}
    with engine(model, tmp_path / "base", max_model_len=128, **options) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push()
            assert_seen(llm.generate([prompt(images[0])], GREEDY, use_tqdm=False)[0], images[0])
        llm.llm_engine.add_request("0", prompt(images[0]), GREEDY)
        train(model, 2)
        sync.push()
        llm.llm_engine.add_request("1", prompt(images[1]), GREEDY)
        ended = {output.request_id[0]: output for output in stepped(llm)}
        for name, image in enumerate(images):
            assert_seen(ended[str(name)], image)

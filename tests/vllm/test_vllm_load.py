"""Adapters from folders: onto what an engine was started from, at base-model speed, and off again, every bit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from peft import LoraConfig, get_peft_model
from torch import nn

from lora_merge import InvalidInput, LoraMergeError, PushFailed, PushRefused, UnsupportedAdapter, VllmSync
from lora_merge.engine.state import OWN, State
from lora_merge.engine.vllm.loading import checkpoint
from lora_merge.serve import aload_adapter, aunload_adapter, load_adapter, unload_adapter
from tests.vllm.test_vllm_processes import Server, greedy

DENSE = {"target_modules": engines.LINEARS}
EXPERTS = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
EXTENDED = {"worker_extension_cls": "shared_weights.Shared"}
READ = {"load_format": "auto"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0, build: Any = engines.qwen2, **options: Any) -> Any:
    return models.with_lora(build, seed=seed, **DENSE | options)


def saved(model: Any, folder: Path, base: Path) -> Path:
    """The adapter of a model as PEFT saves it."""
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


def states(llm: Any) -> list[State]:
    model = nn.Linear(1, 1)
    with closing(VllmSync(model, llm)) as sync:
        return sync.states()


def assert_base(llm: Any, model: Any, **options: Any) -> None:
    with model.disable_adapter():
        assert_answers(ask(llm), model, **options)


def gpt2() -> nn.Module:
    """Weights that are stored `[in, out]`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (engines.qwen2, DENSE | {"use_rslora": True}),
    "patterns": (engines.llama, DENSE | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*up_proj": 32}}),
    "DoRA": (engines.gemma2, DENSE | {"use_dora": True}),
    "biases": (engines.phi, {"target_modules": ["q_proj", "fc1", "fc2"], "bias": "lora_only"}),
    "fan_in_fan_out": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "a head": (lambda: engines.qwen2(tied=False), DENSE | {"modules_to_save": ["lm_head"]}),
    "an embedding": (lambda: engines.qwen2(tied=False), {"target_modules": ["embed_tokens", "q_proj"]}),
    "mixtral": (engines.mixtral, EXPERTS),
    "qwen3_moe": (engines.qwen3_moe, EXPERTS),
    "gpt_oss": (engines.gpt_oss, EXPERTS),
    "latent attention": (engines.deepseek_v3, {"target_modules": ["q_proj", "kv_b_proj", "o_proj", "down_proj"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, tmp_path: Path) -> None:
    """Layers that vLLM lays out anew after loading, as all linear ones on CPUs, are made of what a checkpoint holds."""
    build, options = KINDS[kind]
    model = models.with_lora(build, **options)
    other = models.with_lora(build, **options | {"r": 2, "modules_to_save": None, "bias": "none"})
    train(other, 7)
    if kind in ("biases", "a head"):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
    if kind == "an embedding":  # which PEFT saves with its adapter: it may have been trained
        model.get_base_model().model.embed_tokens.base_layer.weight.data.mul_(1.25)
    base = tmp_path / "base"
    # vLLM's Transformers backend changes classes of the process that it is in.
    settings: dict[str, Any] = READ | {"processes": kind == "biases"}
    settings |= {"attention_backend": "CPU_MLA"} if kind == "latent attention" else {}
    inexact = {"tolerance": 0.2, "greedy": False} if kind == "latent attention" else {}
    with engine(other, base, **settings) as llm:
        first, second = saved(model, tmp_path / "first", base), saved(other, tmp_path / "second", base)
        for version, (folder, policy) in enumerate([(first, model), (second, other), (first, model)], 1):
            report = load_adapter(llm, folder, verify=version == 2)
            assert report.merge == "engine"
            assert report.version == version
            assert not report.differs
            assert_answers(ask(llm), policy, **inexact)
        assert not unload_adapter(llm).nbytes
        assert_base(llm, other, **inexact)
        load_adapter(llm, second)
        load_adapter(llm, second)  # counts once
        assert_answers(ask(llm), other, **inexact)
        if kind == "qwen2":  # a base of the same names and shapes
            twin = tmp_path / "twin" / "config.json"
            twin.parent.mkdir()
            twin.write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 1e-5}))
            with pytest.warns(UserWarning, match=r"computes otherwise.*rms_norm_eps 1e-05 \(engine: 1e-06\)"):
                assert load_adapter(llm, first, base=twin.parent).differs


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """An engine of two tensor-parallel workers, which keep their weights as they are loaded, and its checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        base = tmp_path_factory.mktemp("wide") / "base"
        options = EXTENDED | READ | {"enable_lora": True, "max_lora_rank": 8}
        with engine(policy(), base, processes=True, tensor_parallel_size=2, **options) as llm:
            yield llm, base


def test_every_bit(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """Of two workers: after an unload those that the engine was started with; loaded, those of a trainer's push."""
    llm, base = wide
    model, other = policy(), policy(r=2, target_modules=["v_proj", "down_proj"])
    first, second = saved(model, tmp_path / "first", base), saved(other, tmp_path / "second", base)
    bits, loaded = llm.collective_rpc("bits"), []
    for folder in (first, second, first, first):
        load_adapter(llm, folder)
        loaded.append(llm.collective_rpc("bits"))
        (state,) = states(llm)
        assert (state.kind, state.base, state.adapter) == ("merged", OWN, folder.name)
        assert folder.name in str(state)
    assert loaded[0] == loaded[2] == loaded[3] != loaded[1]
    assert_answers(ask(llm), model)
    unload_adapter(llm)
    assert llm.collective_rpc("bits") == bits
    (state,) = states(llm)
    assert (state.kind, state.base, state.adapter) == ("base", OWN, "")
    with pytest.raises(PushRefused, match="there is nothing to unload"):
        unload_adapter(llm)
    used = []
    for step in range(20):
        load_adapter(llm, second if step % 2 else first)
        used.append(llm.collective_rpc("resident"))
    assert all(last - early < 8 << 20 for early, last in zip(used[5], used[-1], strict=True)), used
    unload_adapter(llm)
    assert llm.collective_rpc("bits") == bits


def test_a_head_comes_and_goes(tmp_path: Path) -> None:
    """What comes whole is in the checkpoint, too."""

    def build() -> nn.Module:
        return engines.qwen2(tied=False)

    model, other = policy(build=build, modules_to_save=["lm_head"]), policy(build=build, r=2)
    with torch.no_grad():
        model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    base = tmp_path / "base"
    with engine(other, base, processes=True, **EXTENDED | READ) as llm:
        first, second = saved(model, tmp_path / "first", base), saved(other, tmp_path / "second", base)
        bits = llm.collective_rpc("bits")
        for folder, served in [(second, other), (first, model), (second, other), (first, model)]:
            load_adapter(llm, folder)
            assert_answers(ask(llm), served)
        unload_adapter(llm)
        assert llm.collective_rpc("bits") == bits


def test_trainers_before_and_after(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """A trainer pushes over what was loaded, once; what it has pushed is no checkpoint any more."""
    llm, base = wide
    model, folder = policy(), saved(policy(seed=0), tmp_path / "adapter", base)
    load_adapter(llm, folder)
    trained = policy(seed=9)  # another base
    with closing(VllmSync(trained, llm, merge="engine")) as sync:
        assert sync.push().base_sent
        assert_answers(ask(llm), trained)
        for call in (lambda: load_adapter(llm, folder), lambda: unload_adapter(llm)):
            before = sync.states()
            with pytest.raises(PushRefused, match="which a trainer pushed over"):
                call()
            assert sync.states() == before
        assert sync.push(mode="adapter").base_sent
        assert_answers(ask(llm, sync.lora_request()), trained)
        with pytest.raises(PushRefused, match="which a trainer pushed over"):
            load_adapter(llm, folder)
        sync.push(mode="merged")
        llm.collective_rpc("scale")  # nobody's weights any more: the engine's own are read again
        assert sync.states()[0].kind == "dirty"
    with pytest.raises(PushRefused, match="reads the engine's own checkpoint again"):
        unload_adapter(llm)
    load_adapter(llm, folder)
    assert_answers(ask(llm), model)
    unload_adapter(llm)
    assert_base(llm, model)
    with closing(VllmSync(model, llm, mode="adapter")) as sync:
        assert sync.push().base_sent
        assert_answers(ask(llm, sync.lora_request()), model)
    llm.collective_rpc("scale")
    load_adapter(llm, folder)


# where -> whether the engine is dirty then
PHASES = {
    "hello": False,
    "dry_run": False,
    "check_update": False,
    "adopt_checkpoint": False,
    "connect": False,
    "note_pause": False,
    "receive_update": False,
    "products": True,
    "finish": True,
    "merge": True,
}
PHASES_AFTER = {"receive_update": False, "unmerge": True, "products": True, "merge": True}
PHASES_OFF = {"hello": False, "unload": False, "unmerge": True, "finish": True, "merge": True}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("phases", [PHASES, PHASES_AFTER, PHASES_OFF], ids=["first", "second", "off"])
def test_workers_fail_in_each_phase(
    phases: dict[str, bool], ranks: list[int], wide: tuple[Any, Path], tmp_path: Path
) -> None:
    """Until all workers have the adapter nothing has changed; what is dirty is healed by the next load."""
    llm, base = wide
    model, folder = policy(), saved(policy(), tmp_path / "adapter", base)
    other = saved(policy(r=2), tmp_path / "other", base)
    load_adapter(llm, folder)
    for where, dirty in phases.items():
        if phases is PHASES:
            unload_adapter(llm)
            if where in ("adopt_checkpoint", "dry_run", "check_update"):
                llm.collective_rpc("forget")
        before, bits = states(llm), llm.collective_rpc("bits")
        llm.collective_rpc("fail", args=(where, ranks, 0))
        with pytest.raises(LoraMergeError, match=f"injected into {where}"):
            unload_adapter(llm) if phases is PHASES_OFF else load_adapter(llm, other)
        assert llm.collective_rpc("mend") == ["well"] * 2
        (state,) = states(llm)
        assert (state.kind == "dirty") == dirty, where
        assert dirty or ([state] == before and llm.collective_rpc("bits") == bits), where
        load_adapter(llm, folder)
        assert_answers(ask(llm), model)


def test_reading_again_fails(wide: tuple[Any, Path], tmp_path: Path) -> None:
    llm, base = wide
    model, folder = policy(), saved(policy(), tmp_path / "adapter", base)
    load_adapter(llm, folder)
    for where in ("reload_checkpoint", "bucket", "commit"):
        llm.collective_rpc("scale")
        llm.collective_rpc("fail", args=(where, [1], 0))
        with pytest.raises(PushFailed, match=rf"injected into {where}.*start the engine anew"):
            load_adapter(llm, folder)
        llm.collective_rpc("mend")
        assert states(llm)[0].kind == "dirty"
        load_adapter(llm, folder)
        assert_answers(ask(llm), model)
    unload_adapter(llm)
    assert_base(llm, model)


def test_what_does_not_fit(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """Every engine is as before; the error says what to do."""
    llm, base = wide
    model = policy()
    folder = saved(model, tmp_path / "adapter", base)
    load_adapter(llm, folder)
    before, bits = states(llm), llm.collective_rpc("bits")

    def wide_model() -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"intermediate_size": 512}, tie_word_embeddings=True))

    for name, build in (("sizes", wide_model), ("llama", engines.llama), ("deep", engines.qwen3)):
        engines.save_base(build(), tmp_path / f"{name} base")
        saved(policy(build=build), tmp_path / name, tmp_path / f"{name} base")
    saved(policy(target_modules=["embed_tokens"]), tmp_path / "tied", base)
    half = saved(policy(), tmp_path / "half", base)
    config = json.loads((half / "adapter_config.json").read_text())
    (half / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    changing = saved(policy(), tmp_path / "pissa", base)
    (changing / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    nameless = saved(policy(), tmp_path / "nameless", base)
    (nameless / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    cases: list[tuple[Path, Path | None, type[LoraMergeError], str]] = [
        (tmp_path / "sizes", None, PushRefused, "another model than the engine serves.*of another size"),
        (tmp_path / "sizes", base, InvalidInput, "does not fit the base.*size mismatch"),
        (tmp_path / "llama", None, PushRefused, "another model than the engine serves.*nothing would fill"),
        (tmp_path / "deep", None, PushRefused, "another model than the engine serves"),
        (tmp_path / "tied", None, PushRefused, "changes tied tensors apart.*merge it with PEFT"),
        (tmp_path / "half", None, InvalidInput, "does not fit the base.*have no place"),
        (tmp_path / "pissa", None, UnsupportedAdapter, "changes the base that the adapter belongs to"),
        (tmp_path / "nameless", None, InvalidInput, "names no base model: pass base="),
        (tmp_path / "nowhere", None, InvalidInput, "holds no adapter of PEFT's"),
        (folder, tmp_path / "nowhere", InvalidInput, "base: there is no folder .*nowhere"),
    ]
    for adapter, given, error, match in cases:
        with pytest.raises(error, match=f"(?s){match}"):
            load_adapter(llm, adapter, base=given)
        assert states(llm) == before, adapter
        assert llm.collective_rpc("bits") == bits, adapter
    assert_answers(ask(llm), model)
    load_adapter(llm, nameless, base=base)
    with pytest.raises(InvalidInput, match="pause must be one of"):
        load_adapter(llm, folder, pause="never")
    with pytest.raises(InvalidInput, match="got none"):
        unload_adapter([])


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 17, 18, 250]}},
    ],
    ids=["one update", "tokens"],
)
def test_tied_weights_that_change_alike(config: dict[str, Any], wide: tuple[Any, Path], tmp_path: Path) -> None:
    """Rows take the base's others with them, so that its weights are read here."""
    llm, base = wide
    model = policy(**config)
    engines.train(model, size=0.05)
    load_adapter(llm, saved(model, tmp_path / "adapter", base))
    assert_answers(ask(llm), model)
    unload_adapter(llm)
    assert_base(llm, model)


def trained_on(part: Any, folder: Path, base: Path, **options: Any) -> Path:
    """An adapter on a part of a model, which then acts in the whole of it; saved."""
    adapted: Any = get_peft_model(part, LoraConfig(r=4, init_lora_weights=False, **options)).eval()
    return saved(adapted, folder, base)


def test_an_adapter_of_an_encoder(wide: tuple[Any, Path], tmp_path: Path) -> None:
    """AutoModel makes a model without the head of the one that is served."""
    llm, base = wide
    whole, bits = policy().unload().eval(), llm.collective_rpc("bits")
    options = {"target_modules": ["q_proj", "down_proj"], "task_type": "FEATURE_EXTRACTION"}
    folder = trained_on(whole.model, tmp_path / "adapter", base, **options)
    with pytest.warns(UserWarning, match="was trained on the Qwen2Model around model of Qwen2ForCausalLM"):
        load_adapter(llm, folder)
    assert_answers(ask(llm), whole)
    unload_adapter(llm)
    assert llm.collective_rpc("bits") == bits


def test_an_adapter_of_the_text_of_a_model_with_images(tmp_path: Path) -> None:
    """The engine has that as a part, with names of its own."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    whole, base = engines.idefics3().eval(), tmp_path / "base"
    with engine(whole, base, **READ, limit_mm_per_prompt={"image": 0}) as llm:
        bare = ask(llm)
        assert_answers(bare, whole)
        text = LlamaForCausalLM(whole.config.text_config)
        text.model, text.lm_head = whole.model.text_model, whole.lm_head
        folder = trained_on(text, tmp_path / "adapter", base, target_modules=[*engines.LINEARS, "lm_head"])
        whole.lm_head = text.lm_head
        with pytest.warns(UserWarning, match="was trained on the LlamaForCausalLM around model.text_model, lm_head"):
            report = load_adapter(llm, folder)
        assert all("vision_model" in name or "connector" in name for name in report.left_out)
        assert_answers(ask(llm), whole)
        unload_adapter(llm)
        for now, then in zip(ask(llm), bare, strict=True):
            assert now.outputs[0].token_ids == then.outputs[0].token_ids


def test_engines_whose_checkpoint_is_not_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that are laid out anew nothing is known but what the checkpoint says: it has to be the engine's."""
    model = policy()
    with engine(model, tmp_path / "base") as llm:  # random weights
        folder = saved(model, tmp_path / "adapter", tmp_path / "base")
        before = ask(llm)
        with pytest.raises(PushRefused, match=r"load_format='dummy'.*cannot be read again"):
            load_adapter(llm, folder)
        assert states(llm)[0].kind == "nothing"
        assert [o.outputs[0].token_ids for o in ask(llm)] == [o.outputs[0].token_ids for o in before]
    with engine(model, tmp_path / "base", **READ) as llm:
        from safetensors.torch import load_file, save_file

        file = tmp_path / "base" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
        file.unlink()
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(PushRefused, match=r"base is not any more what .*model\.safetensors was written at"):
            load_adapter(llm, folder)
        monkeypatch.setattr(checkpoint, "check_unchanged", lambda *args: {})  # had nobody seen that
        with pytest.raises(PushRefused, match=r"model\.norm\.weight is not what .* holds"):
            load_adapter(llm, folder)
        assert states(llm)[0].kind == "nothing"
        assert_base(llm, model)


def test_random_weights_that_keep_their_layout(tmp_path: Path) -> None:
    """What lies in the engine is the base, whatever it is."""
    model = policy()
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        folder, bits = saved(model, tmp_path / "adapter", tmp_path / "base"), llm.collective_rpc("bits")
        load_adapter(llm, folder)
        assert llm.collective_rpc("bits") != bits
        unload_adapter(llm)
        assert llm.collective_rpc("bits") == bits
        load_adapter(llm, folder)
        llm.collective_rpc("scale")
        with pytest.raises(PushFailed, match=r"load_format='dummy'.*start the engine anew"):
            load_adapter(llm, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Checkpoint, engine and adapter in dtypes of their own: the base is the engine's, and there is one rounding."""
    model = policy(build=engines.llama)
    base = tmp_path / "base"
    with engine(model, base, processes=True, **EXTENDED | READ | {"dtype": str(dtype).removeprefix("torch.")}) as llm:
        model.to(dtype)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        folder = saved(model, tmp_path / "adapter", base)
        bits = llm.collective_rpc("bits")
        load_adapter(llm, folder)
        loaded = llm.collective_rpc("bits")
        unload_adapter(llm)
        assert llm.collective_rpc("bits") == bits
        with closing(VllmSync(model, llm, merge="trainer")) as sync:
            sync.push()
        assert llm.collective_rpc("bits") == loaded != bits


async def in_flight(base: Path, folder: Path, model: Any) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = engines.engine_options(model) | READ | {"max_model_len": 256, "worker_extension_cls": "engines.Slow"}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(base), **options))
    try:
        with pytest.raises(InvalidInput, match="has to be awaited"):
            load_adapter(llm, folder)

        async def answer(tokens: int) -> Any:
            last = None
            sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
            prompt = {"prompt_token_ids": engines.prompts(1)[0]}
            async for last in llm.generate(prompt, sampling, request_id=os.urandom(4).hex()):  # noqa: B007
                pass
            return last

        running = asyncio.ensure_future(answer(40))
        await asyncio.sleep(0.2)
        assert (await aload_adapter(llm, folder)).version == 1
        assert len((await running).outputs[0].token_ids) == 40
        assert_answers([await answer(10)], model, engines.prompts(1))
        await llm.collective_rpc("slow", args=(True,))
        running = asyncio.ensure_future(answer(100))
        await asyncio.sleep(0.5)
        assert not running.done()
        await aunload_adapter(llm)  # one message: it pauses, reads and lets go on
        # Nothing else is sent to the engine.
        assert len((await asyncio.wait_for(running, 60)).outputs[0].token_ids) == 100
        await llm.collective_rpc("slow", args=(False,))
        assert (await aload_adapter(llm, folder)).version == 3
        output = await answer(4)
        if getattr(output.outputs[0], "weight_versions", None):
            assert folder.name in str(output.outputs[0].weight_versions)
    finally:
        llm.shutdown()


def test_in_an_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in flight go on; answers are marked with the adapter's name."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model = policy()
    engines.save_base(model.get_base_model(), tmp_path / "base")
    asyncio.run(in_flight(tmp_path / "base", saved(model, tmp_path / "adapter", tmp_path / "base"), model))


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "lora_merge", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def test_a_server_by_command(tmp_path: Path) -> None:
    model = policy()
    base, prompt = tmp_path / "base", engines.prompts(1)[0]
    engines.save_base(model.get_base_model(), base)
    folder = saved(model, tmp_path / "my adapter", base)
    server = Server(base, tmp_path / "log", load_format="auto")
    try:
        server.wait()
        with model.disable_adapter():
            bare = greedy(model, prompt)
        assert server.generate(prompt) == bare
        done = command("load", server.url, folder, "--verify")
        assert done.returncode == 0, done.stderr
        assert "my adapter (merged@1)" in done.stdout
        assert server.generate(prompt) == greedy(model, prompt) != bare
        done = command("unload", server.url, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["version"] == 2
        assert server.generate(prompt) == bare
        done = command("unload", server.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert "there is nothing to unload" in done.stderr
        done = command("load", server.url, tmp_path / "nowhere", "--json")
        assert done.returncode == 1
        assert json.loads(done.stdout)["kind"] == "InvalidInput"
        assert command("load", server.url, folder, "--base", base, "--pause", "abort", "--name", "mine").returncode == 0
        assert server.generate(prompt) == greedy(model, prompt)
    finally:
        server.close()
    done = command("load", server.url, folder)
    assert done.returncode == 1
    assert "does not answer" in done.stderr

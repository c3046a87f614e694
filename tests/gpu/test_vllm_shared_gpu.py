"""One copy of the weights for a trainer and an engine on a GPU: bf16, CUDA graphs, experts, and a KV cache that sleeps
while the weights stay.

    pytest -m gpu tests/gpu/test_vllm_shared_gpu.py      # about three minutes: an engine each
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, engine
from repository import ROOT, SUPPORT
from torch import Tensor, nn
from weight_bits import bits_of

from lora_merge import InvalidInput, VllmSync

pytestmark = pytest.mark.gpu
BF16 = {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28, "load_format": "auto"}
GRAPHS = BF16 | {"enforce_eager": False}
DENSE = {"target_modules": engines.LINEARS}
MOE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": engines.EXPERTS}
TOLERANCE = 0.15
"""As of test_vllm_gpu.py."""


def policy(build: Any, **config: Any) -> Any:
    with torch.device("cuda"):
        return models.with_lora(build, dtype=torch.bfloat16, **config).cuda()


def base_bits(model: nn.Module) -> dict[str, str]:
    return {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name}


def base_of(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if "lora_" not in name]


def assert_answers(outputs: Any, model: Any) -> None:
    """The engine's, and not those of the base: what `disable_adapter` computes is far off, and lies in the engine then,
    until the next push."""
    engines.assert_answers(outputs, model, tolerance=TOLERANCE, greedy=False)
    with model.disable_adapter(), pytest.raises(AssertionError):
        engines.assert_answers(outputs, model, tolerance=2 * TOLERANCE, greedy=False)


def trained(model: Any, steps: int = 1) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
    tokens = torch.tensor(engines.prompts()[:1], device="cuda")
    for _ in range(steps):
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.empty_cache()


def cycle(model: Any, llm: Any, base: dict[str, str]) -> None:
    """Train, push and answer in turns; the base comes back bit for bit."""
    with closing(VllmSync(model, llm, share=True)) as sync:
        assert sync.sharing is not None
        print(sync.sharing)
        assert not sync.sharing.apart
        assert sync.sharing.shared == sum(p.nbytes for p in base_of(model))
        for steps in (1, 3, 1):
            trained(model, steps)
            report = sync.push()
            assert (report.shared, report.nbytes) == (sync.sharing.shared, 0)
            assert_answers(ask(llm), model)
            assert sync.push(verify=True).version == report.version + 1
            assert_answers(ask(llm), model)
    assert base_bits(model) == base


def test_dense_with_graphs(tmp_path: Path) -> None:
    """Graphs were captured before the trainer came, and read its weights; a trainer on the GPU, one that waited on the
    CPU, one that was never loaded."""
    model = policy(engines.qwen2, **DENSE)
    base = base_bits(model)
    waits = copy.deepcopy(model).cpu()
    with engine(model, tmp_path / "base", **GRAPHS) as llm:
        allocated = torch.cuda.memory_allocated()
        with closing(VllmSync(model, llm, share=True)) as sync:
            assert sync.sharing is not None
            freed = allocated - torch.cuda.memory_allocated()
            assert freed >= 0.5 * sync.sharing.shared, (freed, sync.sharing)
        cycle(model, llm, base)
        cycle(waits, llm, base)
        assert {p.device.type for p in waits.parameters()} == {"cuda"}
        never_loaded(llm, base)


def never_loaded(llm: Any, base: dict[str, str]) -> None:
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model

    with init_empty_weights():
        empty = engines.qwen2().to(torch.bfloat16)
    empty.tie_weights()
    model: Any = get_peft_model(empty, LoraConfig(r=4, lora_alpha=64, target_modules=engines.LINEARS)).eval()
    with closing(VllmSync(model, llm, share=True)) as sync:
        assert base_bits(model) == base
        trained(model, 3)
        sync.push()
        engines.assert_answers(ask(llm), model, tolerance=TOLERANCE, greedy=False)
        sync.close(meta=True)
    assert {p.device.type for p in base_of(model)} == {"meta"}


def test_experts(tmp_path: Path) -> None:
    """Fused experts of transformers lie in vLLM's, which Triton's kernels leave as they were loaded."""
    model = policy(engines.qwen3_moe, **MOE)
    base = base_bits(model)
    with engine(model, tmp_path / "base", **BF16) as llm:
        cycle(model, llm, base)


def sleeping(folder: Path) -> dict[str, Any]:
    """In a process of its own, as vLLM's sleep mode allows one engine in the life of a process."""
    model = policy(engines.qwen2, **DENSE)
    base, found = base_bits(model), dict[str, Any]()
    with engine(model, folder / "base", **GRAPHS | {"enable_sleep_mode": True}) as llm:
        with closing(VllmSync(model, llm, share=True)) as sync:
            assert sync.sharing is not None
            assert not sync.sharing.apart
            for level in (1, 2):
                with pytest.raises(InvalidInput, match="takes the engine's weights along"):
                    llm.sleep(level=level)
            for step in range(3):
                trained(model)
                torch.cuda.empty_cache()
                before = torch.cuda.mem_get_info()[0]
                sync.sleep()
                found[f"freed {step}"] = torch.cuda.mem_get_info()[0] - before
                trained(model)
                sync.push()
                prompts = [{"prompt_token_ids": list(p)} for p in engines.prompts()]
                assert_answers(sync.generate(prompts, engines.GREEDY, use_tqdm=False), model)
        assert base_bits(model) == base
        llm.sleep(level=2)  # it throws the weights away, and a trainer that shares them brings its own
        with closing(VllmSync(model, llm, share=True)) as sync:
            trained(model)
            sync.push()
            prompts = [{"prompt_token_ids": list(p)} for p in engines.prompts()]
            assert_answers(sync.generate(prompts, engines.GREEDY, use_tqdm=False), model)
        assert base_bits(model) == base
    return found


def test_the_kv_cache_sleeps_alone(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    print(found)
    assert all(freed >= 0.9 * BF16["kv_cache_memory_bytes"] for freed in found.values()), found


if __name__ == "__main__":
    seen = sleeping(Path(sys.argv[1]))
    Path(sys.argv[1], "found.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)

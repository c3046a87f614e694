"""Models with layers beside the usual ones, out of Megatron-Bridge into a real vLLM engine: trained on two ranks and
pushed merged; what the engine says and holds is that of transformers' model with the merged weights."""

from __future__ import annotations

import importlib.util
import os
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import hf_kinds
import pytest
import torch
import torch.distributed as dist
from processes import spawn

from lora_merge import MergedWeights, VllmSync

if importlib.util.find_spec("megatron") is None:  # which is not to be imported before `megatron_kinds`
    pytest.skip("takes megatron-core", allow_module_level=True)
PROMPTS = [[(7 * i + 11 * p) % 100 + 1 for i in range(12)] for p in range(4)]
TOLERANCE = 2e-5
"""Of log-probs in float32; see `test_vllm_megatron`."""
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def work(rank: int, folder: Path, kind: str, grid: dict[str, int], options: dict[str, Any]) -> None:
    import megatron_kinds as mk
    import megatron_models as mm

    from lora_merge.megatron import Chunks

    os.environ["EXPERTS_ANEW"] = "1"  # laid out as vLLM's CPU kernels read them
    hf = hf_kinds.hf_model(kind, larger=True)
    options = options | {"worker_extension_cls": "sliced_weights.Sliced"}
    with engines.engine(hf, folder, processes=True, **options) if rank == 0 else nullcontext() as llm:
        llms = [llm] if llm is not None else []
        _, chunks = mk.build(kind, str(folder), mm.Grid(**grid), torch.float32)
        # vLLM leaves a tower out where it takes no images: what is trained of one would be refused.
        text = [f"*language_model.*.{name}" for name in mm.LINEARS] if "limit_mm_per_prompt" in options else None
        mk.adapt(kind, chunks, text)
        model = Chunks(chunks)
        sync = VllmSync(model, llms or None, bucket_bytes=1 << 17)
        report = sync.push(verify=True)
        assert report.version == 1
        bits = [one.collective_rpc("bits") for one in llms]
        policy = hf_kinds.with_weights(hf, {name: tensor.clone() for name, tensor in MergedWeights(model)})
        for one in llms:
            outputs = engines.ask(one, None, PROMPTS)
            engines.assert_answers(outputs, policy, PROMPTS, tolerance=TOLERANCE)
            assert engines.log_prob_errors(outputs, hf, PROMPTS).max() > 100 * TOLERANCE, "nothing was trained"
        if kind != "qwen3_vl_moe":  # whose experts transformers does not write as the hub has them
            with closing(VllmSync(policy, llms or None, bucket_bytes=1 << 17)) as plain:
                plain.push()
            assert [one.collective_rpc("bits") for one in llms] == bits
        sync.close()
        dist.barrier()


CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt_oss", {"ep": 2}, {}),
    ("qwen2_5_vl", {"tp": 2}, {"skip_tokenizer_init": False, "max_model_len": 256}),
    ("qwen3_vl_moe", {"ep": 2}, NO_IMAGES),
]


@pytest.mark.parametrize(("kind", "grid", "options"), CASES, ids=[case[0] for case in CASES])
def test_the_engine_holds_what_megatron_trains(
    kind: str, grid: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    if "vl" in kind:
        pytest.importorskip("torchvision", reason="vLLM's models with images take torchvision")
    hf_kinds.save(hf_kinds.hf_model(kind, larger=True), tmp_path)
    if "limit_mm_per_prompt" not in options and "vl" in kind:
        engines.qwen2_5_vl_processor().save_pretrained(tmp_path)
    spawn(2, work, tmp_path, kind, grid, options, timeout=timedelta(minutes=8))

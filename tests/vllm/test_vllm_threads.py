"""An engine in the trainer's process that is called from several threads, given twice, and pushed to after its end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import engines
import models
import pytest
from engines import ask, assert_answers, engine, train
from vllm.config import get_current_vllm_config_or_none

from lora_merge import InvalidInput, PushRefused, VllmSync
from lora_merge.serve import load_adapter

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def at_once(count: int, work: Any) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_engine_and_many_callers(tmp_path: Path) -> None:
    """Two calls at a time left layers as they are at loading: no push healed the engine any more."""
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    raised: list[Exception] = []

    with engine(model, tmp_path / "base") as llm:
        for twice in ([llm, llm], [llm, llm.llm_engine]):
            with pytest.raises(InvalidInput, match="name each engine once, got one twice: handles 0 and 1"):
                VllmSync(model, twice)
            with pytest.raises(InvalidInput, match="handles 0 and 1"):
                load_adapter(twice, tmp_path)

        def push() -> None:
            try:
                VllmSync(model, llm, bucket_bytes=1 << 17).push()
            except Exception as error:
                raised.append(error)

        for _ in range(5):
            at_once(4, push)
        told = {type(error) for error in raised}
        assert told <= {PushRefused}, raised
        assert all("another trainer's push" in str(error) for error in raised), raised
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        train(model)
        sync.push(verify=True)
        assert_answers(ask(llm), model)
        with engine(model, tmp_path / "base") as other:  # both are asked side by side
            for step in range(5):
                train(model, step)
                VllmSync(model, [llm, other], bucket_bytes=1 << 17).push()
            assert get_current_vllm_config_or_none() is None
            assert_answers(ask(other), model)
            assert_answers(ask(llm), model)
    with pytest.raises(PushRefused, match=r"engine 0 cannot be pushed to: .*this engine was shut down"):
        sync.push()

"""Imported once by the server that test workers are forked from."""
# ruff: noqa: F401

import docs_code
import helpers
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.transformer.attention
import megatron_models
import peft
import pytest
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2_moe.modeling_qwen2_moe
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe

megatron_models.bridge()

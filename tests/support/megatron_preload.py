"""Imported once by the server that test workers are forked from."""
# ruff: noqa: F401, I001

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core compiles activations, which takes longer than all of a case

import docs_code
import helpers
import lora_merge.kernels.cpu
import lora_merge.models.megatron.live
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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # builds the table of all models, and keeps it
megatron_models.bridge()

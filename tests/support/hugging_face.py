"""Tiny language models of Hugging Face's transformers, built from configurations only: nothing is downloaded."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

VOCAB = 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
    },
    "gemma": {**_COMMON, "head_dim": 8},
    "gemma2": {**_COMMON, "head_dim": 8},
    "gemma3_text": {**_COMMON, "head_dim": 8},
    "phi": _COMMON,
    "phi3": _COMMON,
}
_EXPERTS = {**_COMMON, "num_experts_per_tok": 2}
EXPERT_CONFIGS: dict[str, dict[str, Any]] = {  # mixtures of experts
    "mixtral": {**_EXPERTS, "num_local_experts": 7},
    "qwen3_moe": {**_EXPERTS, "num_experts": 7, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {**_EXPERTS, "num_experts": 7},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 7, "head_dim": 8, "sliding_window": 4},
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def language_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Return a causal language model with random weights and no dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**{**CONFIGS, **EXPERT_CONFIGS}[family], **changes})
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "activation_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # Transformers' grouped products are not in float64.
    options = {"experts_implementation": "eager"} if family in EXPERT_CONFIGS else {}
    model: nn.Module = AutoModelForCausalLM.from_config(config, **options).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialized to zero
            nn.init.normal_(parameter, std=0.1)
    return model

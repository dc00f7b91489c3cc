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


def language_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Return a causal language model with random weights and no dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "activation_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialized to zero
            nn.init.normal_(parameter, std=0.1)
    return model

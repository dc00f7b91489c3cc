"""Tiny models of transformers, saved as pretrained directories: nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, FFN, HEADS, LAYERS = 64, 32, 48, 4, 2
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_OPT = {**_COMMON, "word_embed_proj_dim": HIDDEN, "ffn_dim": FFN, "pad_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gpt2": {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
    "opt": _OPT,
    "gemma": {**_GROUPED, "head_dim": 8},
    "phi": _GROUPED,
    "falcon": _COMMON,
    "gpt_neox": _COMMON,
    "stablelm": _GROUPED,
    "olmo2": _GROUPED,
    "starcoder2": _GROUPED,
    "bert": {**_COMMON, "pad_token_id": 0},
}


def model_class(family: str) -> Any:
    import transformers

    return transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a model with random weights, random biases and no dropout."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    for name, value in config.to_dict().items():
        if ("drop" in name or name.endswith("_dropout_prob")) and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(seed)
    model: nn.Module = model_class(family).from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # some are initialized to constants
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def load(path: Path, **options: Any) -> nn.Module:
    """Return the model of a directory that `save` has written, in float64 and train mode."""
    model: nn.Module = model_class(path.name).from_pretrained(path, dtype=torch.float64, **options)
    return model.train()


def save(family: str, folder: Path, **options: Any) -> Path:
    """Write `build(family)` to a folder, as transformers does, and return it."""
    path = folder / family
    build(family).save_pretrained(path, **options)
    return path


def stored(path: Path) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files of a directory."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        loaded = load_file(file)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def assert_same_directories(ours: Path, theirs: Path) -> None:
    """Compare the files' tensors and the models that transformers makes of two directories, bit for bit."""
    left, right = stored(ours), stored(theirs)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    loaded = [model_class(theirs.name).from_pretrained(each, dtype="auto") for each in (ours, theirs)]
    assert type(loaded[0]) is type(loaded[1])
    states = [each.state_dict() for each in loaded]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.dtype == states[1][name].dtype and torch.equal(value, states[1][name]), name
    configs = [each.config.to_dict() for each in loaded]
    for config in configs:
        del config["_name_or_path"]
    assert configs[0] == configs[1]


def adapter_config(path: Path) -> dict[str, Any]:
    """Return the configuration of an adapter of PEFT, with the names of modules, a set in PEFT, in order."""
    config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    for name in ("target_modules", "modules_to_save"):
        config[name] = sorted(config[name] or [])
    return config


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor, seed: int) -> Tensor:
    """Return a loss that depends on each logit differently."""
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(seed))
    return (logits * weights).sum() / 100


def second_block(family: str) -> str:
    """Return the name of the second of the two blocks."""
    names = {
        "gpt2": "transformer.h",
        "falcon": "transformer.h",
        "opt": "model.decoder.layers",
        "gpt_neox": "gpt_neox.layers",
        "bert": "bert.encoder.layer",
    }
    return f"{names.get(family, 'model.layers')}.1"

"""Language models of transformers that generate, and the ways of generating that tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.hugging_face import VOCAB, language_model

PROMPTS = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
PADDED = PROMPTS.clone()
PADDED[1, :2] = 0
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 2},
    "sampling": {"do_sample": True, "top_k": 0},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 4},
    "gemma3_text": {"sliding_window": 5},
}


def generator_of(family: str, **changes: Any) -> Any:
    """Return a language model in float64 whose next tokens depend on all tokens before."""
    torch.manual_seed(0)
    model = language_model(family, **{**_CHANGES.get(family, {}), **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def generated(model: Any, generate: Callable[..., Any]) -> dict[str, tuple[list[list[int]], list[int]]]:
    """Return, for each of VARIANTS, the tokens `[samples, length]` and the bytes of each layer's keys and values."""
    found = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(5)
        result = generate(
            input_ids=PADDED,
            attention_mask=(PADDED != 0).long(),
            pad_token_id=0,
            max_new_tokens=8,
            return_dict_in_generate=True,
            **options,
        )
        found[name] = (result.sequences.tolist(), cache_bytes(result.past_key_values))
    return found


def cache_bytes(cache: Any) -> list[int]:
    """Return the bytes of the keys and values of each layer; [] without a cache."""
    layers = [] if cache is None else cache.layers
    tensors: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in layers]
    return [sum(tensor.nbytes for tensor in pair) for pair in tensors]

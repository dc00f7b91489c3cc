"""`generate` on tensor-parallel and on data-parallel ranks: tokens equal one device, and the bytes of caches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

import weft
from support.architectures import ARCHITECTURES, VOCAB
from support.generation import PROMPTS, VARIANTS, generated, generator_of
from support.ranks import on_ranks, run_on_ranks
from weft.strategy import Plan
from weft.strategy.data_parallel.fully_sharded import apply_fsdp

# By name: ranks, family, plan, options of the plan, and the number of ranks that share the heads of a cache.
LAYOUTS: dict[str, tuple[int, str, str, dict[str, Any], int]] = {
    "llama": (2, "llama", "auto", {}, 2),
    "llama huggingface": (2, "llama", "huggingface", {}, 2),
    "llama sequence_parallel": (2, "llama", "auto", {"sequence_parallel": True}, 2),
    "gpt2": (2, "gpt2", "auto", {}, 1),  # its layer of queries, keys and values is not sharded
    "qwen3 sequence_parallel": (4, "qwen3", "auto", {"sequence_parallel": True}, 4),
    "qwen2": (4, "qwen2", "auto", {}, 1),  # 2 heads of keys do not divide by 4 ranks
}


def generate_on_ranks(world_size: int) -> dict[str, Any]:
    """Return (tokens, bytes of each layer's cache) by layout and variant, and those of one device."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    found = {}
    for name, (num_ranks, family, plan, options, _) in LAYOUTS.items():
        if num_ranks == world_size:
            model = generator_of(family)
            expected = generated(model, model.generate)
            weft.parallelize(model, mesh, Plan(plan, **options))
            found[name] = (generated(model, model.generate), expected)
    return found


@functools.cache
def runs_on(world_size: int) -> list[dict[str, Any]]:
    return run_on_ranks(world_size, generate_on_ranks)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_equal_one_device_and_caches_have_the_heads_of_the_rank(name: str, variant: str) -> None:
    pytest.importorskip("transformers")
    world_size, _, _, _, shards = LAYOUTS[name]
    for found in runs_on(world_size):
        (tokens, caches), (expected_tokens, expected_caches) = (each[variant] for each in found[name])
        assert tokens == expected_tokens
        assert caches == [num_bytes // shards for num_bytes in expected_caches]
        assert bool(caches) == (variant != "no cache")


@on_ranks(4)
def test_too_few_heads_of_keys_raise_with_the_plan_of_transformers(world_size: int) -> None:
    pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    with pytest.raises(ValueError, match="its 2 key heads do not divide by 4; use another tensor-parallel"):
        weft.parallelize(generator_of("qwen2"), mesh, "huggingface")


@on_ranks(2)
def test_fully_sharded_replicas_generate_different_numbers_of_tokens(rank: int) -> None:
    """FSDP2 gathers blocks in each forward: transformers continues until all ranks are done (`synced_gpus`)."""
    pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    model = generator_of("llama")
    options: dict[str, Any] = {"pad_token_id": 0, "max_new_tokens": 3 + 4 * rank}
    prompts = PROMPTS[rank : rank + 1, 2 * rank :]
    variants: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": False, "num_beams": 2}]
    expected = [model.generate(prompts, **options, **each) for each in variants]
    apply_fsdp(model, mesh)
    for variant, one_device in zip(variants, expected, strict=True):
        assert torch.equal(model.generate(prompts, **options, **variant), one_device)


@on_ranks(2)
def test_encoder_decoder_models_generate() -> None:
    """`generate` calls the encoder outside of the model's forward: FSDP2 must gather the model's own parameters."""
    pytest.importorskip("transformers")
    architecture = next(each for each in ARCHITECTURES if each.name == "T5")
    batch = architecture.batch()
    del batch["decoder_input_ids"]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "eos_token_id": VOCAB, "decoder_start_token_id": 1}

    def tokens_of(model: Any) -> Tensor:
        torch.manual_seed(7)
        tokens: Tensor = model.generate(**batch, **options)
        return tokens

    expected = tokens_of(architecture.build().eval())
    assert len(expected.unique()) > 4
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    sharded = architecture.build().eval()
    weft.parallelize(sharded, mesh, "auto")
    assert torch.equal(tokens_of(sharded), expected)
    fully_sharded = architecture.build().eval()
    apply_fsdp(fully_sharded, mesh)
    register_fsdp_forward_method(fully_sharded, "generate")
    assert torch.equal(tokens_of(fully_sharded), expected)

"""`generate` of models in stages: tokens equal one device, and each rank has the cache of its own layers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.generation import PROMPTS, VARIANTS, generated, generator_of
from support.ranks import on_ranks, run_on_ranks
from weft.strategy import Plan
from weft.strategy.pipeline import Pipeline

CUTS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "gemma3_text": "model.layers.1"}


def pipeline_of(model: nn.Module, cuts: list[str], tensor_ranks: int = 1, **options: Any) -> Pipeline:
    num_ranks = torch.distributed.get_world_size() // tensor_ranks
    mesh = init_device_mesh("cpu", (num_ranks, tensor_ranks), mesh_dim_names=("pipeline_parallel", "tensor_parallel"))
    pipeline = Pipeline(model, mesh, cuts, **options)
    if tensor_ranks > 1:
        weft.parallelize(model, mesh, Plan("auto", sequence_parallel=True))
    return pipeline


@functools.cache
def runs_of_stages(world_size: int) -> list[dict[str, Any]]:
    return run_on_ranks(world_size, generate_in_stages)


def generate_in_stages(world_size: int) -> dict[str, Any]:
    """Return (tokens, bytes of each layer's cache) by family and variant, and those of one device."""
    result = {}
    for family, cut in CUTS.items() if world_size == 2 else [("llama", CUTS["llama"])]:
        model = generator_of(family)
        expected = generated(model, model.generate)
        pipeline = pipeline_of(model, [cut], world_size // 2)
        result[family] = (generated(model, pipeline.generate), expected)
    return result


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("world_size", "family"), [(2, "llama"), (2, "gpt2"), (2, "gemma3_text"), (4, "llama")])
def test_tokens_equal_one_device_and_caches_are_those_of_the_stage(world_size: int, family: str, variant: str) -> None:
    """On 4 ranks: two stages, each on two tensor-parallel ranks with sequence parallelism."""
    pytest.importorskip("transformers")
    for rank, found in enumerate(runs_of_stages(world_size)):
        (tokens, caches), (expected_tokens, expected_caches) = (each[variant] for each in found[family])
        assert tokens == expected_tokens
        tensor_ranks = world_size // 2
        stage = rank // tensor_ranks
        assert len(caches) == len(expected_caches)
        for layer, (found_bytes, full_bytes) in enumerate(zip(caches, expected_caches, strict=True)):
            if layer == stage:
                assert found_bytes == full_bytes // tensor_ranks
            else:  # a byte for each key and value, in place of 16 heads' features of 8 bytes or more
                assert found_bytes <= full_bytes // 128


class Writer(nn.Module):
    """Generates by a loop of its own, without a cache; its layers return tuples with Python values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, skip: bool = False) -> dict[str, Any]:
        x = self.embed(tokens)
        first, seen = x * 2, []
        for block in self.blocks:
            x, number, _ = block(x, first if skip else None)
            seen.append(number)
        if skip and x.abs().sum() > 0:  # a path that depends on values, which a schedule does not support
            x = self.dropout(x) + first
        return {"logits": self.head(x), "seen": seen}

    def generate(self, tokens: Tensor, num_tokens: int = 3, skip: bool = False) -> tuple[Tensor, list[int]]:
        for _ in range(num_tokens):
            output = self(tokens, skip=skip)
            tokens = torch.cat((tokens, output["logits"][:, -1:].argmax(-1)), dim=1)
        return tokens, output["seen"]


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.number = number

    def forward(self, x: Tensor, other: Tensor | None) -> tuple[Tensor, int, None]:
        x = torch.tanh(self.linear(x))
        return (x if other is None else x + other), self.number, None


@on_ranks(2)
def test_models_with_loops_of_their_own_generate() -> None:
    """Two stages on each rank; outputs have Python values, the path depends on values, a value skips stages."""
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = Writer().double()
    reference = copy.deepcopy(model)
    pipeline = pipeline_of(model, ["blocks.1", "blocks.2", "blocks.3"], schedule="interleaved")
    assert torch.equal(model.generate(tokens)[0], reference.generate(tokens)[0])  # before the first step
    for skip in (False, True, False):
        expected, seen = reference.generate(tokens, skip=skip)
        found, found_seen = pipeline.generate(tokens, skip=skip)
        assert torch.equal(found, expected) and found_seen == seen == [0, 1, 2, 3]
    # Training steps, evaluations and generation alternate.
    loss = pipeline.step(tokens, lambda x: F.cross_entropy(model(x)["logits"][:, -1], x[:, 0]))
    expected_loss = F.cross_entropy(reference(tokens)["logits"][:, -1], tokens[:, 0])
    assert abs(loss - expected_loss) < 1e-12
    results = pipeline.evaluate(tokens, lambda x: (model.generate(x)[0], model(x)["logits"]))
    if pipeline.has_last_stage:
        [(found, logits)] = results  # the step runs once, for the full batch
        assert torch.equal(found, reference.generate(tokens)[0])
        assert torch.allclose(logits, reference(tokens)["logits"])
    else:
        assert results == []
    assert len(pipeline.evaluate(tokens, lambda x: model(x)["logits"])) == 2 * pipeline.has_last_stage


class Tied(Writer):
    def forward(self, tokens: Tensor, skip: bool = False) -> dict[str, Any]:
        hidden = super().forward(tokens, skip)["logits"]
        return {"logits": F.linear(hidden[..., :8], self.embed.weight), "seen": []}


@on_ranks(2)
def test_errors_name_what_to_do(rank: int) -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = Writer()
    pipeline = pipeline_of(model, ["blocks.2"])
    with pytest.raises(RuntimeError, match=r"a training step calls generate.*call generate before the step"):
        pipeline.step(tokens, lambda x: model.generate(x)[0].sum())
    with pytest.raises(ValueError, match="generate got other arguments on rank 1 of the pipeline than on rank 0"):
        pipeline.generate(tokens + rank)
    with pytest.raises(TypeError, match="'num'"):  # an error of the model's own code, on all ranks
        pipeline.generate(tokens, num=1)
    assert pipeline.generate(tokens)[0].shape == (2, 6)  # the errors above have left nothing in flight
    model = Tied()
    pipeline = pipeline_of(model, ["blocks.2"])
    with pytest.raises(RuntimeError, match="linear reads a parameter between the layers"):
        pipeline.generate(tokens)
    with pytest.raises(TypeError, match="a Sequential has no generate"):
        pipeline_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["1"]).generate(tokens)
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    pipeline = pipeline_of(model, ["decoder"], verify="never")
    with pytest.raises(ValueError, match="calls its encoder outside of the model's forward"):
        pipeline.generate(tokens)
    config = transformers.MambaConfig(vocab_size=16, hidden_size=8, state_size=2, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0)
    pipeline = pipeline_of(model, ["backbone.layers.1"], verify="never")
    with pytest.raises(ValueError, match="got a cache with a LinearAttentionLayer, and stages support keys and values"):
        pipeline.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    found = pipeline.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0)
    assert torch.equal(found, expected)


@on_ranks(4)
def test_replicas_with_sharded_stages_generate_different_numbers_of_tokens(rank: int) -> None:
    """Stages are gathered once for a `generate`, which replicas may call with other prompts, or not at all."""
    pytest.importorskip("transformers")
    if not hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward"):
        pytest.skip("FSDP2 of this torch cannot shard stages")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline_parallel", "data_parallel"))
    model: Any = generator_of("llama")
    reference = copy.deepcopy(model)
    pipeline = Pipeline(model, mesh, [CUTS["llama"]])
    pipeline.fully_shard(mesh["data_parallel"])
    replica = rank % 2
    prompts = PROMPTS[replica : replica + 1, 2:]
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 3 + 4 * replica}
    for _ in range(2):
        found = pipeline.generate(prompts, **options)
        assert torch.equal(found, reference.generate(prompts, **options))
    bytes_of_shards = sum(p.to_local().nbytes for p in model.parameters())
    assert bytes_of_shards < sum(p.nbytes for p in reference.parameters()) / 2
    loss = pipeline.step(PROMPTS, lambda x: model(x, use_cache=False).logits.square().mean())
    assert abs(loss - reference(PROMPTS).logits.square().mean()) < 1e-10

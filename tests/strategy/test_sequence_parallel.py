"""Plans with sequence_parallel: parity with one device, saved bytes and collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from strategy.sequence_models import ATTENTION, ROWS, TOKENS, sequence_parallel, token_loss
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

import weft
from support.models import EncoderClassifier, FeedForward, Gpt2, Llama, LlamaArgs, RMSNorm
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan, checkpoint_activations, report


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("rules", ["auto", {**ROWS, **ATTENTION}], ids=["auto", "rules"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_matches_one_device(world_size: int, rules: Any, optimizer: str) -> None:
    torch.manual_seed(0)
    model = assert_same_training(
        lambda m: sequence_parallel(m, world_size, rules),
        Llama(LlamaArgs(dtype=torch.float64)),
        token_loss,
        TOKENS,
        optimizer,
    )
    weft.strategy.check_replicated_gradients(model)


@on_ranks(2, 4)
def test_layers_with_gathered_output_match_one_device(world_size: int) -> None:
    torch.manual_seed(0)
    assert_same_training(
        lambda m: sequence_parallel(m, world_size), Gpt2(dtype=torch.float64), token_loss, TOKENS, "SGD"
    )


@on_ranks(2, 4)
def test_layers_outside_of_the_blocks_are_sharded(world_size: int) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dtype=torch.float64))
    # With other rows than the embedding, it is a single layer, like the output layer of a pipeline's last stage.
    model.output = nn.Linear(model.output.in_features, 64, bias=False, dtype=torch.float64)
    model = assert_same_training(lambda m: sequence_parallel(m, world_size), model, token_loss, TOKENS, "SGD")
    assert model.output.weight.placements == (Shard(0),)


class BiasedBlock(nn.Module):
    """An attention and an MLP with biases; a scale, a replicated linear layer and norms between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = BiasedAttention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), RMSNorm(dim, torch.get_default_dtype())
        self.mix = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, *, mask: Tensor, hidden: Tensor) -> tuple[Tensor, str]:
        hidden = hidden + self.scale * self.attention(mask=mask, x=self.norm1(hidden))
        return hidden + self.mlp(self.norm2(self.mix(hidden))), "more"


class BiasedAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, dim)
        self.blocks = nn.ModuleList(BiasedBlock(dim) for _ in range(3))
        self.head = nn.Linear(dim, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=x.dtype).tril().log()
        for block in self.blocks:
            x, _ = block(mask=mask, hidden=x)
        return self.head(x)


@on_ranks(2, 4)
@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
def test_biases_scales_and_token_wise_layers_match_one_device(world_size: int, checkpoint: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rules = {
        **{f"blocks.*.attention.{name}_proj": "column" for name in "kv"},
        "blocks.*.attention.q_proj": {"style": "column", "heads": "num_heads"},
        "blocks.*.attention.o_proj": "row",
        "blocks.*.mlp": "column_row_mlp",
    }

    def parallelize(model: nn.Module) -> nn.Module:
        sequence_parallel(model, world_size, rules)
        checkpoint_activations(model, checkpoint)
        return model

    assert_same_training(parallelize, Biased(), token_loss, TOKENS[:4], "SGD")


TORCH_STYLES = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "layers.0": PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Shard(1), None, None), use_local_output=True
    ),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    **{f"layers.*.attention.w{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.feed_forward.w1": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.feed_forward.w3": ColwiseParallel(),
}


@on_ranks(1, 2, 4)
def test_torch_styles_match_one_device(world_size: int) -> None:
    """The plan is as in torch's and Lightning's examples, whose code divides the numbers of heads."""

    def parallelize(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.attention.n_heads //= world_size
            layer.attention.n_kv_heads //= world_size
        return weft.parallelize(model, tensor_parallel(world_size), TORCH_STYLES)

    torch.manual_seed(0)
    model = assert_same_training(parallelize, Llama(LlamaArgs(dtype=torch.float64)), token_loss, TOKENS, "SGD")
    styles = {row.parameter: row.style for row in report(model).rows}
    assert styles["tok_embeddings.weight"] == "vocab_embedding"
    assert styles["output.weight"] == "column_gather_output"
    assert styles["layers.1.ffn_norm.weight"] == styles["norm.weight"] == "sequence_parallel"
    if world_size > 1:
        assert "'norm': computes on all tokens, as it is in none of the blocks that are sharded" in report(model).notes
        assert "activations between the blocks' layers are sharded along the sequence" in report(model).notes


class Scaling(nn.Module):
    """A module that weft does not know by name to compute on each token separately."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.linspace(0.5, 1.5, dim)), nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("option", [False, True], ids=["by the rule", "by the option"])
def test_rule_declares_token_wise_module(world_size: int, option: bool) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dtype=torch.float64))
    for layer in model.layers:
        layer.ffn_norm = Scaling(16).double()
    plan = {**ROWS, **ATTENTION}
    with pytest.raises(ValueError, match=r"ffn_norm', a Scaling, is left unsharded .* or the style 'sequence_para"):
        sequence_parallel(copy.deepcopy(model), world_size, plan)
    plan["layers.*.ffn_norm"] = "sequence_parallel"
    trained = assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), Plan(plan, sequence_parallel=option)),
        model,
        token_loss,
        TOKENS,
        "SGD",
    )
    weft.strategy.check_replicated_gradients(trained)


@on_ranks(2)
def test_several_sequence_lengths_match_one_device(world_size: int) -> None:
    """A checkpoint recomputes with its own sequence length, not with that of the last forward."""
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(dtype=torch.float64))
    model = sequence_parallel(copy.deepcopy(reference), world_size)
    checkpoint_activations(model, "full")
    for each in (model, reference):
        losses = [token_loss(each, (t[:, :n], y[:, :n])) for (t, y), n in zip(TOKENS, (9, 4, 7), strict=False)]
        sum(losses).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), theirs[name].grad, rtol=1e-10, atol=1e-12)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppingBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DroppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.dropout = FeedForward(8, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.ones_like(x)) + 0 * self.mlp(x)


@on_ranks(2)
def test_dropout_mask_follows_global_position(world_size: int) -> None:
    """With one seed on all ranks, torch's dropout would use the same mask for the tokens of each rank."""
    torch.manual_seed(0)
    model = sequence_parallel(Dropping(), world_size)
    torch.manual_seed(1)
    dropped = model(torch.randn(2, 10, 8))
    assert not torch.equal(dropped[:, :5], dropped[:, 5:])
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(1)
    plain = weft.nn.Dropout(0.5, group_name="")
    torch.randn(2, 10, 8)
    assert torch.equal(dropped, plain(torch.ones(2, 10, 8))), "one device must drop the same elements"
    model.eval()
    assert torch.equal(model(torch.randn(2, 10, 8)), torch.ones(2, 10, 8))


@on_ranks(2)
def test_unshardable_models_raise(world_size: int) -> None:
    with pytest.raises(ValueError, match=r"'layers.0.attention', a MultiheadAttention, is left unsharded .* all tok"):
        sequence_parallel(UnshardedAttention(), world_size, {"layers.*.mlp": "column_row_mlp"})
    with pytest.raises(ValueError, match=r"'blocks.0.attention', a BiasedAttention, is left unsharded"):
        sequence_parallel(Biased(), world_size, {"blocks.*.mlp": "column_row_mlp"})
    with pytest.raises(ValueError, match=r"'h.0.attn', a Gpt2Attention, is left unsharded"):
        sequence_parallel(Gpt2(), world_size, {"h.*.mlp": "column_row_mlp"})
    with pytest.raises(ValueError, match="is not a module inside a block that holds column"):
        sequence_parallel(EncoderClassifier(), world_size)
    with pytest.raises(ValueError, match="finds no repeated blocks with layers that the plan shards"):
        sequence_parallel(FeedForward(8, 16), world_size, {"": "column_row_mlp"})
    with pytest.raises(ValueError, match="finds no repeated blocks with layers that the plan shards"):
        sequence_parallel(nn.ModuleList(FeedForward(8, 16) for _ in range(2)), world_size, {"*": "column_row_mlp"})
    model = Llama(LlamaArgs(n_layers=3))
    model.layers[2].ffn_norm = model.layers[0].ffn_norm
    separated = {name.replace("*", str(i)): style for i in (0, 2) for name, style in {**ROWS, **ATTENTION}.items()}
    with pytest.raises(ValueError, match=r"'layers.0.ffn_norm' is one module in blocks that do not follow each other"):
        sequence_parallel(model, world_size, separated)
    head_norm = {**ROWS, **ATTENTION, "layers.*.attention.norm": "sequence_parallel"}
    model = Llama(LlamaArgs())
    for layer in model.layers:
        layer.attention.norm = nn.LayerNorm(4)
    with pytest.raises(
        ValueError, match=r"'layers.0.attention.norm' gets the style .* is inside a module that computes on"
    ):
        weft.parallelize(model, tensor_parallel(world_size), head_norm)
    model = Llama(LlamaArgs())
    model.norm = model.layers[1].ffn_norm
    with pytest.raises(ValueError, match=r"'norm' is also a layer of the repeated blocks"):
        sequence_parallel(model, world_size)
    model = Llama(LlamaArgs())
    model.whole = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), model.layers[0].ffn_norm)])
    with pytest.raises(ValueError, match=r"'whole.0.1' is also a layer of the repeated blocks"):
        sequence_parallel(model, world_size, {**ROWS, **ATTENTION})
    model = sequence_parallel(Llama(LlamaArgs()), world_size)
    with pytest.raises(ValueError, match="without sequence_parallel for export"):
        weft.export_local(model)
    with pytest.raises(ValueError, match="another plan"):
        weft.parallelize(model, tensor_parallel(world_size), "auto")


class UnshardedAttention(nn.Module):
    """Blocks whose attention no rule shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(UnshardedAttentionBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class UnshardedAttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(8, 2), FeedForward(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x, x, x)[0])


@on_ranks(2)
def test_each_rank_saves_only_its_tokens(world_size: int) -> None:
    """Between the layers of blocks, each rank saves only its own tokens."""
    saved_bytes = {}
    for is_on in (False, True):
        torch.manual_seed(0)
        model = weft.parallelize(
            Llama(LlamaArgs(dim=64, hidden_dim=128, n_layers=4)),
            tensor_parallel(world_size),
            Plan("auto", sequence_parallel=is_on),
        )
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = model.tok_embeddings(torch.randint(37, (2, 32)))
            for layer in model.layers:
                x = layer(x, model.cos, model.sin)
        weights = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
        saved_bytes[is_on] = sum(saved.values()) - weights
    assert saved_bytes[True] <= 0.75 * saved_bytes[False]


# Two layers: an all-gather before and a reduce-scatter after each attention and MLP; one all-gather at the end.
FORWARD = {"all_gather_into_tensor": 2 * 2 + 1, "reduce_scatter_tensor": 2 * 2}
# The gradient of the first scatter is gathered; the fused MLP gathers its input again; each layer has two norms.
BACKWARD = {"all_gather_into_tensor": 2 * 2 + 1 + 2, "reduce_scatter_tensor": 2 * 2, "all_reduce": 2 * 2}


@on_ranks(2)
def test_number_of_collectives(world_size: int) -> None:
    torch.manual_seed(0)
    batch, length, dim = 2, 32, 64
    model = sequence_parallel(Llama(LlamaArgs(dim=dim, hidden_dim=128, n_layers=2)), world_size)
    x = torch.randn(batch, length, dim, requires_grad=True)

    def forward() -> Tensor:
        y = x
        for layer in model.layers:
            y = layer(y, model.cos, model.sin)
        return y

    y = collectives_of(forward, FORWARD)
    collectives_of(lambda: y.sum().backward(), BACKWARD)


class Crossing(BiasedBlock):
    """Its attention also reads another sequence, which is unsharded on every rank."""

    def forward(self, *, hidden: Tensor, mask: Tensor) -> tuple[Tensor, str]:
        return self.attention(mask=mask.requires_grad_(), x=hidden), "more"


@on_ranks(2)
def test_second_differentiable_input_raises(world_size: int) -> None:
    model = Biased()
    model.blocks = nn.ModuleList([Crossing(16)])
    sequence_parallel(model, world_size)
    with pytest.raises(TypeError, match="got 2 tensors that require gradients, as in cross-attention"):
        model(TOKENS[0][0])

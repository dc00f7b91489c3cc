"""The effect of parallelize on a model's parameters, and its errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from support.models import FeedForward, Gpt2, Llama, LlamaArgs, token_batches
from support.parity import local_shard, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan, report
from weft.strategy.data_parallel import apply_fsdp


@on_ranks(1, 2, 4)
def test_parameters_become_dtensors(world_size: int) -> None:
    model = Llama(LlamaArgs(tie_head=True))
    model.norm.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state_names = list(model.state_dict())
    mesh = tensor_parallel(world_size)
    assert weft.parallelize(model, mesh, "auto") is model
    assert list(model.state_dict()) == state_names
    assert [name for name, _ in model.named_parameters()] == list(before)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter), name
        assert parameter.shape == before[name].shape
        assert parameter.requires_grad == (name != "norm.weight")
        local = parameter.to_local()
        assert torch.equal(local, local_shard(before[name], parameter))
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
    assert model.output.weight is model.tok_embeddings.weight
    assert isinstance(model, Llama) and isinstance(model.output, nn.Linear)
    assert not isinstance(model.cos, DTensor)


@on_ranks(4)
def test_uneven_and_empty_shards_match_unsharded(rank: int, world_size: int) -> None:
    model = FeedForward(8, 5)  # at most two rows per rank: 2, 2, 1, 0
    x = torch.randn(3, 8)
    expected = model(x).detach()
    weft.parallelize(model, tensor_parallel(world_size), {"": "column_row_mlp"})
    assert model.w1.weight.to_local().shape == ((2, 2, 1, 0)[rank], 8)
    assert model.w2.weight.to_local().shape == (8, (2, 2, 1, 0)[rank])
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert model.w1.weight.grad.to_local().shape == ((2, 2, 1, 0)[rank], 8)


@on_ranks(2)
def test_meta_models_stay_meta_with_equal_plan(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    real = weft.parallelize(Llama(LlamaArgs()), mesh, "auto")
    with torch.device("meta"):
        model = Llama(LlamaArgs())
    weft.parallelize(model, mesh, "auto")
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    assert report(model) == report(real)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), real.parameters(), strict=True):
            ours.to_local().copy_(theirs.to_local())
    model.cos, model.sin = real.cos, real.sin
    tokens = token_batches(1, 37)[0][0]
    assert torch.equal(model(tokens), real(tokens))


@on_ranks(2)
def test_tensor_parallel_axis_of_larger_mesh_is_used(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = weft.parallelize(FeedForward(8, 12), mesh, {"": "column_row_mlp"})
    assert model.w1.weight.device_mesh == mesh["tensor_parallel"]
    unnamed = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="none named 'tensor_parallel'"):
        weft.parallelize(FeedForward(8, 12), unnamed, {"": "column_row_mlp"})


@on_ranks(2)
def test_applying_twice_is_idempotent(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    for plan, other in (
        ("auto", {"layers.*.feed_forward": "column_row_mlp"}),
        ({"layers.0.feed_forward": "replicate"}, "auto"),
    ):
        model = weft.parallelize(Llama(LlamaArgs()), mesh, plan)
        parameters, table = list(model.parameters()), str(report(model))
        again = Plan(plan)
        weft.parallelize(model, mesh, again)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert str(again.report()) == str(report(model)) == table
        with pytest.raises(ValueError, match="parallelized with another plan"):
            weft.parallelize(model, mesh, other)


class Scaled(nn.Module):
    """Reads parameters as plain attributes, in its forward and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = FeedForward(8, 12)
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.bank = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))])

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self.scale, DTensor)
        assert isinstance(self.mlp.w1.weight, DTensor)  # a sharded parameter stays a DTensor
        return self.mlp(x) * self.scale * self.bank[1]

    def penalty(self) -> Tensor:
        return self.scale.square().sum()


@on_ranks(2)
def test_attributes_are_local_inside_forwards_only(world_size: int) -> None:
    model = weft.parallelize(Scaled(), tensor_parallel(world_size), {"mlp": "column_row_mlp"})
    model(torch.randn(3, 8)).sum().backward()
    assert isinstance(model.scale, DTensor) and isinstance(model.scale.grad, DTensor)
    assert model.bank[1].grad is not None and model.bank[0].grad is None
    with weft.strategy.local_parameters():
        model.penalty().backward()
    assert isinstance(model.scale, DTensor)
    assert not isinstance(weft.strategy.local_of(model.scale), DTensor)


@on_ranks(2)
def test_sharded_weight_mixed_with_plain_tensor_raises(world_size: int) -> None:
    model = Gpt2()
    weft.parallelize(model, tensor_parallel(world_size), {"wte": "vocab_embedding"})
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        model(token_batches(1, 37)[0][0])


@on_ranks(2)
def test_deepcopy_of_parallel_model_matches_it(world_size: int) -> None:
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), "auto")
    tokens = token_batches(1, 37)[0][0]
    model(tokens).sum().backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), model(tokens))
    for each in (twin, model):
        each.zero_grad()
        each(tokens).square().sum().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours is not theirs and torch.equal(ours.grad.to_local(), theirs.grad.to_local())


ERRORS = {
    "unmatched": (lambda: Llama(LlamaArgs()), {"layer.*.wq": "column"}, "matches no module"),
    "heads": (
        lambda: Llama(LlamaArgs(n_heads=1)),
        {"layers.*.attention.wq": {"style": "column", "heads": "n_heads"}},
        "layers.0.attention.*n_heads = 1.*2 tensor-parallel ranks",
    ),
    "heads attribute": (
        lambda: Llama(LlamaArgs()),
        {"layers.*.attention.wq": {"style": "column", "heads": "heads"}},
        "'heads' of 'layers.0.attention', which does not exist",
    ),
    "no linear": (lambda: Llama(LlamaArgs()), {"norm": "column"}, "wants an nn.Linear at 'norm', but it is a RMSNorm"),
    "no mlp": (lambda: Llama(LlamaArgs()), {"layers.0": "column_row_mlp"}, "finds no MLP.*attention \\(Attention\\)"),
    "max norm": (
        lambda: nn.Sequential(nn.Embedding(20, 4, max_norm=1.0)),
        {"0": "vocab_embedding"},
        "plain nn.Embedding at '0', but it uses max_norm=1.0",
    ),
    "no attention": (
        lambda: Llama(LlamaArgs()),
        {"layers.0": "attention"},
        "style 'attention' cannot shard 'layers.0' by heads: its children are attention .Attention., .* of which none",
    ),
    "odd heads": (
        lambda: Llama(LlamaArgs(n_heads=3, n_kv_heads=3, dim=12)),
        {"layers.*.attention": "attention"},
        "style 'attention' cannot shard 'layers.0.attention' by heads: n_heads=3 does not divide by 2; use column",
    ),
    "half ignored": (
        lambda: Llama(LlamaArgs(tie_head=True)),
        {"tok_embeddings": "ignore"},
        "'tok_embeddings.weight' and 'output.weight' are one tied parameter",
    ),
    "tied": (
        lambda: Llama(LlamaArgs(tie_head=True)),
        {"tok_embeddings": "vocab_embedding"},
        "'tok_embeddings.weight' and 'output.weight' are one tied parameter",
    ),
    "multihead": (
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2)),
        {"0.out_proj": "row"},
        "'0.out_proj' is a layer of an nn.MultiheadAttention",
    ),
    "nothing found": (lambda: nn.Sequential(nn.Linear(4, 4)), "auto", "found nothing to shard.*weft_fsdp"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", list(ERRORS))
def test_errors_leave_model_unchanged(world_size: int, case: str) -> None:
    make, plan, message = ERRORS[case]
    model = make()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message) as caught:
        weft.parallelize(model, tensor_parallel(world_size), plan)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert [type(m) for m in model.modules()] == classes


@on_ranks(2)
def test_parameters_referenced_elsewhere_raise(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    model = FeedForward(8, 12)
    model.all_weights = [model.w1.weight]
    with pytest.raises(ValueError, match=r"the model itself also keeps 'w1.weight' in its plain attribute"):
        weft.parallelize(model, mesh, {"": "column_row_mlp"})
    model = FeedForward(8, 12)
    model.w1.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"'w1.weight' has gradient hooks"):
        weft.parallelize(model, mesh, {"": "column_row_mlp"})


@on_ranks(2)
def test_dtensors_raise_with_rules_and_are_skipped_by_auto(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    model = Llama(LlamaArgs())
    w1 = model.layers[0].feed_forward.w1
    w1.weight = nn.Parameter(distribute_tensor(w1.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"covers 'layers.0.feed_forward.w1.weight', which is a DTensor already"):
        weft.parallelize(model, mesh, {"layers.*.feed_forward": "column_row_mlp"})
    weft.parallelize(model, mesh, "auto")
    assert type(w1) is nn.Linear
    assert any("layers.0.feed_forward.w1: skipped" in note for note in report(model).notes)
    assert model.layers[1].feed_forward.w1.weight.placements == (Shard(0),)
    assert model.layers[0].feed_forward.w2.weight.placements == (Replicate(),)


def between(linear: nn.Linear, x: Tensor, scale: Tensor) -> Tensor:
    return F.relu(linear(x)) * scale


class ScaleBetween(nn.Module):
    """A replicated parameter between a column and a row layer: its gradient is a partial sum on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(between(self.first, self.norm(x), self.scale))


@on_ranks(2, 3)
def test_partial_gradients_of_replicated_parameters_raise(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    model = weft.parallelize(ScaleBetween(), mesh, {"first": "column", "second": "row"})
    model(torch.randn(4, 8)).square().sum().backward()
    with pytest.raises(ValueError, match="replicated parameters 'scale' differ"):
        weft.strategy.check_replicated_gradients(model)
    llama = weft.parallelize(Llama(LlamaArgs()), mesh, "auto")
    llama(token_batches(1, 37)[0][0]).square().mean().backward()
    weft.strategy.check_replicated_gradients(llama)


@on_ranks(2)
def test_parameters_stay_plain_for_fsdp_on_one_tensor_rank(rank: int, world_size: int) -> None:
    """FSDP2's DTensors then have only the data axis; values, deferred or not, and gradients are those of one device."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))

    def build() -> Llama:
        torch.manual_seed(2)
        return Llama(LlamaArgs(dtype=torch.float64, tie_head=True))

    expected = build()
    tokens = torch.randint(37, (world_size, 3, 9), generator=torch.Generator().manual_seed(4))
    expected(tokens.flatten(0, 1)).square().mean().backward()
    with weft.strategy.deferred_init():
        deferred = build()
    plain = build()
    originals = dict(plain.named_parameters())
    for model in (plain, deferred):
        weft.parallelize(model, mesh, "auto", keeps_plain_on_one_rank=True)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert model is deferred or all(parameter is originals[name] for name, parameter in model.named_parameters())
        assert model.output.weight is model.tok_embeddings.weight
        apply_fsdp(model, mesh["data_parallel"])
        assert {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()} == {("data_parallel",)}
        model(tokens[rank]).square().mean().backward()
        for (name, parameter), value in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), value, rtol=0, atol=0)
            gradient = parameter.grad.full_tensor()
            torch.testing.assert_close(gradient, value.grad, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    with_precision = weft.parallelize(
        build(), mesh, {"layers.*": {"style": "replicate", "precision": "bfloat16"}}, keeps_plain_on_one_rank=True
    )
    assert all(isinstance(parameter, DTensor) for parameter in with_precision.parameters())


@on_ranks(2)
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_nonfinite_gradients_raise_if_ranks_differ(rank: int, world_size: int, is_everywhere: bool) -> None:
    """Non-finite gradients on all ranks are no error of the sharding; on one rank, they are."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    weft.parallelize(model, tensor_parallel(world_size), {"0": "column_gather_output", "1": "replicate"})
    model(torch.ones(3, 8)).sum().backward()
    if is_everywhere or rank == 0:
        model[1].weight.grad.to_local().fill_(float("nan"))
    if is_everywhere:
        weft.strategy.check_replicated_gradients(model)
        return
    with pytest.raises(ValueError, match=r"replicated parameters '1.weight' differ"):
        weft.strategy.check_replicated_gradients(model)


@on_ranks(2)
def test_embedding_with_max_norm_stays_plain(world_size: int) -> None:
    """The embedding's forward writes to its weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8, max_norm=1.0), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    reference, tokens = copy.deepcopy(model), torch.randint(32, (2, 5))
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(tokens).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model[0].weight, reference[0].weight)

"""Stages sharded by plan="auto": evidence from the full model, parameters between layers, tied parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from strategy.test_auto import TiedBias
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.models import FeedForward
from support.ranks import on_ranks
from weft.strategy import Pipeline
from weft.strategy.sharding.local_tensor import local_of
from weft.strategy.sharding.remote_layers import RemoteLayer
from weft.strategy.verification.evidence import StoredRehearsal


class Scaled(nn.Module):
    """The trunk uses a parameter before the layers; the second stage has several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x * self.scale)).tanh())


class NormLast(nn.Module):
    """The second stage has nothing to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = FeedForward(8, 20), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x))


def make_pipeline(model: nn.Module, cut: str) -> Pipeline:
    axes = ("pipeline_parallel", "tensor_parallel")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    pipeline = Pipeline(model, mesh, [cut], num_micro_batches=2)
    weft.parallelize(model, mesh, "auto")
    return pipeline


@on_ranks(4)
@pytest.mark.parametrize(("kind", "cut"), [(Scaled, "up"), (TiedBias, "head"), (TiedBias, "mlp"), (NormLast, "norm")])
def test_stages_match_full_model(rank: int, kind: type[nn.Module], cut: str) -> None:
    torch.manual_seed(1)
    reference = kind().double()
    model = copy.deepcopy(reference)
    pipeline = make_pipeline(model, cut)
    batch = torch.randint(18, (4, 5)) if kind is TiedBias else torch.randn(4, 8, dtype=torch.float64)
    full = torch.optim.SGD(reference.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = reference(batch).square().mean()
        full.zero_grad()
        loss.backward()
        full.step()
        optimizer.zero_grad()
        torch.testing.assert_close(
            pipeline.step(batch, lambda micro_batch: model(micro_batch).square().mean()), loss.detach()
        )
        optimizer.step()
    sharded = 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name), rtol=1e-11, atol=1e-11)
        sharded += local_of(parameter).numel() < parameter.numel()
    assert (sharded > 0) == (kind is not NormLast or rank < 2)


@on_ranks(4)
def test_tied_copies_with_different_shards_raise() -> None:
    """The first stage has the bias outside of its layer, where code may read it; the second stage has the layer."""
    model = TiedBias().double()
    pipeline = make_pipeline(model, "head.decoder")
    with pytest.raises(ValueError, match=r"'head.bias' and 'head.decoder.bias' are copies of one tied parameter"):
        pipeline.step(torch.randint(18, (4, 5)), lambda micro_batch: model(micro_batch).square().mean())


def test_evidence_of_remaining_layers_by_name() -> None:
    model = Scaled()
    stored_rehearsal = StoredRehearsal(model, None)
    remaining = copy.deepcopy(model)
    remaining.up = RemoteLayer("up", 0, model.up)
    rehearsal = stored_rehearsal.for_model(remaining)
    assert rehearsal.called == {id(remaining.first), id(remaining.down)}
    assert rehearsal.covered == {id(remaining), id(remaining.first), id(remaining.down)}
    assert rehearsal.read == set()
    assert rehearsal.calls.keys() == {id(remaining)}
    assert rehearsal.calls[id(remaining)] is stored_rehearsal.rehearsal.calls[id(model)]


def test_copied_model_has_no_evidence() -> None:
    model = Scaled()
    model.stored_rehearsal = StoredRehearsal(model, None)
    assert copy.deepcopy(model).stored_rehearsal is None

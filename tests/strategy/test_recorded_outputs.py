"""Outputs of layers that Transformers records are those of an unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from support.hugging_face import VOCAB, language_model
from support.ranks import on_ranks
from weft.strategy.data_parallel import apply_fsdp


def recorded(model: nn.Module, ids: Tensor) -> list[Tensor]:
    output = model(ids, labels=ids, output_hidden_states=True, output_router_logits=True)
    return [output.loss, output.aux_loss, *output.hidden_states, *output.router_logits]


@on_ranks(2)
@pytest.mark.parametrize("sharding", ["tensor_parallel", "fully_shard"])
def test_recorded_outputs_match_unsharded_ones(world_size: int, sharding: str) -> None:
    torch.manual_seed(0)
    reference = language_model("mixtral").train()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    if sharding == "tensor_parallel":
        weft.parallelize(model, mesh, "auto")
    else:  # the class of the model that records the outputs changes, too
        apply_fsdp(model.model, mesh, reshard_after_forward=True)
    ids = torch.randint(0, VOCAB, (2, 7))
    found, expected = recorded(model, ids), recorded(reference, ids)
    assert len(found) == 2 + 3 + 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # the loss is in float32

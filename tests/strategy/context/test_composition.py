"""Context parallelism with tensor parallelism and with FSDP2: training as on one device."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from strategy.context.test_models import next_token_loss, no_gathers, token_batches
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from support.hugging_face import language_model
from support.models import Llama, LlamaArgs
from support.parity import assert_same_training
from support.ranks import on_ranks
from weft.strategy import parallelize
from weft.strategy.context import carry_through_fsdp, parallelize_context
from weft.strategy.data_parallel import apply_fsdp


def _average_over(group: dist.ProcessGroup, parameter: Tensor) -> None:
    grad = parameter.grad
    assert grad is not None
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    dist.all_reduce(local, group=group)
    local /= group.size()


def _in_two_axes(model: nn.Module, attention: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context_parallel", "tensor_parallel"))
    parallelize(model, mesh["tensor_parallel"], "auto")
    group = mesh.get_group("context_parallel")
    parallelize_context(model, group, attention=attention)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(_average_over, group))
    return model


@on_ranks(4)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("family", ["own", "llama", "gpt2"])
def test_with_tensor_parallelism(attention: str, family: str) -> None:
    torch.manual_seed(0)
    model = Llama(LlamaArgs(dtype=torch.float64)) if family == "own" else language_model(family)
    vocab_size = LlamaArgs().vocab_size if family == "own" else 64
    with no_gathers():
        batches = token_batches(10, 13, vocab_size)
        assert_same_training(
            functools.partial(_in_two_axes, attention=attention), model, next_token_loss, batches, "SGD"
        )


def _fully_sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data_parallel",))
    parallelize_context(model, mesh.get_group())
    apply_fsdp(model, mesh)
    carry_through_fsdp(model)
    return model


@on_ranks(2, 4)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_fsdp(family: str) -> None:
    torch.manual_seed(0)
    with no_gathers():
        assert_same_training(_fully_sharded, language_model(family), next_token_loss, token_batches(10, 13), "SGD")

"""The peak memory of a rank under FSDP2 with the step in the backward: the rank's shards and two FSDP units."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops.memory.counting import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from support.example_modules import load_example
from support.ranks import on_ranks
from weft.strategy import StepInBackward
from weft.strategy.data_parallel import apply_fsdp

TOKENS = torch.randint(256, (1, 3), generator=torch.Generator().manual_seed(0))


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def _sharded_model(
    mesh, tp_size: int, own_units: bool
) -> tuple[nn.Module, StepInBackward, torch.optim.Optimizer, int, int]:
    """Return the example's sharded model, stepper and optimizer, the bytes of all weights and of the largest unit."""
    example = load_example("model")
    with weft.strategy.deferred_init():
        model = example.Transformer(example.ModelArgs(n_heads=8))
    units = [model.tok_embeddings, *model.layers, model.output]
    sizes = _bytes(model), max(map(_bytes, units))
    if tp_size > 1:
        weft.parallelize(model, mesh, "auto")
    else:
        weft.strategy.deferred.materialize(model)
    if own_units:
        for unit in units:
            fully_shard(unit, mesh=mesh["data_parallel"])
        for unit in units:
            unit.set_modules_to_backward_prefetch([unit])  # no prefetch: nothing overlaps on the CPU
        fully_shard(model, mesh=mesh["data_parallel"])
    else:
        apply_fsdp(model, mesh["data_parallel"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, StepInBackward(model, optimizer), optimizer, *sizes


@on_ranks(2, 4)
@pytest.mark.parametrize("own_units", [True, False])
def test_peak_is_within_bound(world_size: int, own_units: bool) -> None:
    """The bound is 3W/n + 2u + 2u/n, besides staging and the activations of two tokens.

    W: the bytes of all weights; n: the number of ranks; u: the bytes of the largest unit. With `apply_fsdp`, the
    parameters outside of blocks are one unit, which stays gathered until the end of the backward.
    """
    tp_size = world_size // 2
    names = ("data_parallel", "tensor_parallel")
    mesh = init_device_mesh("cpu", (2, tp_size), mesh_dim_names=names)
    with counted() as count:
        model, stepper, optimizer, weights, unit = _sharded_model(mesh, tp_size, own_units)
        watch = weft.memory.watch(model, optimizer)
        for step in range(3):
            if step == 2:
                weft.memory.reset_peak()
            logits = model(TOKENS[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
            optimizer.step()
        peak = {name: count.peak(name) for name in ("parameters", "gradients", "optimizer_state", "scratch")}
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        watch.remove()
        stepper.remove()
    step_counts = 4 * len(list(model.parameters()))
    # The norms and the output layer are replicated over the tensor-parallel axis.
    replicated_bytes = (tp_size - 1) * 3 * (_bytes(model.output) + 9 * 128 * 4) // world_size
    activation_bytes = 2 * 3 * 256 * 4
    bound = 3 * weights / world_size + 2 * unit + 2 * unit / world_size
    root = 0 if own_units else _bytes(model.tok_embeddings) + _bytes(model.output)
    total = sum(peak.values())
    assert total <= bound + root + buffers + step_counts + replicated_bytes + activation_bytes, (peak, bound)
    assert total >= 3 * weights / world_size + unit  # so that the bound is tight

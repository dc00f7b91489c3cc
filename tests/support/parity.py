"""Trains a parallelized model and its unsharded copy in lockstep and compares every tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LEARNING_RATE = {"SGD": 0.05, "AdamW": 1e-3}


def tensor_parallel(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor on every rank; other tensors are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(value: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of a full tensor, placed like `like` (by torch.chunk, without communication)."""
    mesh, placement = like.device_mesh, like.placements[0]
    if placement.is_replicate():
        return value
    chunk = -(-value.shape[placement.dim] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, value.shape[placement.dim])
    return value.narrow(placement.dim, start, min(chunk, value.shape[placement.dim] - start))


def assert_close(name: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
    """Assert that the norm of the difference is within `bound`.

    Each rank compares its own shard against bound / sqrt(ranks), so that the full tensor keeps the bound.
    """
    theirs = theirs.detach()
    if isinstance(ours, DTensor):
        bound /= ours.device_mesh.size() ** 0.5
        theirs = local_shard(theirs, ours)
        ours = ours.to_local()
    assert ours.shape == theirs.shape, name
    difference = (ours.detach() - theirs).norm().item()
    assert difference <= bound, f"{name}: differs by {difference:.3g}, allowed {bound:.3g}"


def assert_gradients_agree(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Compare each gradient, relative to its norm or, if that is larger, to 1e-3 of the norm of all gradients.

    The second bound is for gradients that are zero up to rounding.
    """
    theirs = dict(reference.named_parameters())
    total = torch.stack([p.grad.norm() for p in theirs.values() if p.grad is not None]).norm().item()
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            bound = tolerance * max(expected.norm().item(), 1e-3 * total)
            assert_close(f"gradient of {name}", parameter.grad, expected, bound)


def split_key_bias(name: str, ours: Tensor, theirs: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return (ours, theirs, is_key_bias), split into two for the bias of a fused query-key-value layer.

    is_key_bias marks the key third of such a bias. Softmax is invariant to it: its true gradient is zero, and the
    computed one is rounding.
    """
    ours, theirs = ours.detach(), theirs.detach()
    if not name.endswith(("c_attn.bias", "in_proj_bias")):
        return [(ours, theirs, False)]
    third = theirs.numel() // 3
    is_key = torch.arange(theirs.numel()) // third == 1
    if isinstance(ours, DTensor):
        is_key, theirs, ours = local_shard(is_key, ours), local_shard(theirs, ours), ours.to_local()
    return [(ours[is_key], theirs[is_key], True), (ours[~is_key], theirs[~is_key], False)]


def assert_weights_agree(
    model: nn.Module,
    reference: nn.Module,
    bound_of: Callable[[Tensor], float],
    bound_of_key_bias: Callable[[Tensor], float] | None = None,
) -> None:
    """Compare each weight w within bound_of(w), and a fused layer's key bias within bound_of_key_bias(w) if given."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        pairs = [(parameter.detach(), theirs[name].detach(), False)]
        if bound_of_key_bias is not None:
            pairs = split_key_bias(name, parameter, theirs[name])
        for ours, expected, is_key_bias in pairs:
            bound = bound_of_key_bias if is_key_bias else bound_of
            assert_close(name, ours, expected, bound(expected))


def assert_same_training(
    parallelize: Callable[[nn.Module], nn.Module],
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    optimizer: str,
    *,
    tolerance: float | None = None,
    **optimizer_options: Any,
) -> nn.Module:
    """Train both models on `batches`, compare them after each step and return the parallelized model.

    Default tolerances, relative for losses, gradients and weights: 1e-10 in float64, 1e-5 in float32. The exception is
    the weights after AdamW in float32: lr * steps * 1e-2 for each element, because AdamW's first steps follow the sign
    of gradients that may be pure rounding. The gradient of a key bias is always rounding and may differ in sign; AdamW
    then moves the two biases apart by at most 2 * lr * steps, which is their bound.
    """
    reference = copy.deepcopy(model)
    model = parallelize(model)
    dtype = next(reference.parameters()).dtype
    tolerance, lr = tolerance or TOLERANCE[dtype], LEARNING_RATE[optimizer]
    optimizers = [
        getattr(torch.optim, optimizer)(m.parameters(), lr=lr, **optimizer_options) for m in (model, reference)
    ]
    num_steps = 0
    for batch in batches:
        ours, theirs = loss_of(model, batch), loss_of(reference, batch)
        assert abs(ours.item() - theirs.item()) <= tolerance * abs(theirs.item()), (num_steps, ours, theirs)
        ours.backward()
        theirs.backward()
        assert_gradients_agree(model, reference, tolerance)
        for each in optimizers:
            each.step()
            each.zero_grad()
        num_steps += 1
    if optimizer == "AdamW" and dtype == torch.float32:
        reach = lr * num_steps
        assert_weights_agree(
            model, reference, lambda w: reach * 1e-2 * w.numel() ** 0.5, lambda w: 2 * reach * w.numel() ** 0.5
        )
    else:
        assert_weights_agree(model, reference, lambda w: tolerance * w.norm().item())
    return model

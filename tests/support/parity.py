"""Trains a parallelized model and its unsharded twin side by side and compares every tensor."""

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


def whole(tensor: Tensor) -> Tensor:
    """The global value of a DTensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(value: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole value, cut as `like` is (by torch.chunk; nothing is sent)."""
    mesh, placement = like.device_mesh, like.placements[0]
    if placement.is_replicate():
        return value
    chunk = -(-value.shape[placement.dim] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, value.shape[placement.dim])
    return value.narrow(placement.dim, start, min(chunk, value.shape[placement.dim] - start))


def assert_close(name: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
    """Each rank compares its own part, with its share of the bound, so that the whole keeps the bound."""
    theirs = theirs.detach()
    if isinstance(ours, DTensor):
        bound /= ours.device_mesh.size() ** 0.5
        theirs = own_part(theirs, ours)
        ours = ours.to_local()
    assert ours.shape == theirs.shape, name
    difference = (ours.detach() - theirs).norm().item()
    assert difference <= bound, f"{name}: differs by {difference:.3g}, allowed {bound:.3g}"


def assert_gradients_agree(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Per tensor, relative to its norm; a gradient that is zero but for rounding, to a thousandth of all."""
    theirs = dict(reference.named_parameters())
    total = torch.stack([p.grad.norm() for p in theirs.values() if p.grad is not None]).norm().item()
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            bound = tolerance * max(expected.norm().item(), 1e-3 * total)
            assert_close(f"gradient of {name}", parameter.grad, expected, bound)


def key_bias_apart(name: str, ours: Tensor, theirs: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Both in parts, each with whether it is the key third of a joined query-key-value layer's bias.

    Softmax does not see a key's bias: its true gradient is zero, and what is there is rounding.
    """
    ours, theirs = ours.detach(), theirs.detach()
    if not name.endswith(("c_attn.bias", "in_proj_bias")):
        return [(ours, theirs, False)]
    third = theirs.numel() // 3
    is_key = torch.arange(theirs.numel()) // third == 1
    if isinstance(ours, DTensor):
        is_key, theirs, ours = own_part(is_key, ours), own_part(theirs, ours), ours.to_local()
    return [(ours[is_key], theirs[is_key], True), (ours[~is_key], theirs[~is_key], False)]


def assert_weights_agree(
    model: nn.Module,
    reference: nn.Module,
    bound_of: Callable[[Tensor], float],
    bound_of_key_bias: Callable[[Tensor], float] | None = None,
) -> None:
    """Each weight within `bound_of` it; a joined key bias within a bound of its own, if one is given."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        parts = [(parameter.detach(), theirs[name].detach(), False)]
        if bound_of_key_bias is not None:
            parts = key_bias_apart(name, parameter, theirs[name])
        for ours, expected, is_key_bias in parts:
            bound = bound_of_key_bias if is_key_bias else bound_of
            assert_close(name, ours, expected, bound(expected))


def assert_trains_alike(
    parallelize: Callable[[nn.Module], nn.Module],
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    optimizer: str,
    *,
    tolerance: float | None = None,
    **optimizer_options: Any,
) -> nn.Module:
    """Ten steps or so of both; returns the parallelized model.

    Tolerances, if none is given: 1e-10 in float64, 1e-5 in float32, relative for losses, gradients and weights; but
    for AdamW in float32 lr * steps * 1e-2 in each element, as its first steps are the sign of gradients that may be
    nothing but rounding. Such a gradient may even differ in sign, and then AdamW moves the two weights apart at full
    speed, whatever computed them: a key bias is held to the 2 * lr * steps that AdamW can do, there alone.
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

"""Code outside a forward that computes with sharded parameters gives one device's values, gradients and writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support.models import Llama, LlamaArgs, token_batches
from support.parity import full
from support.ranks import on_ranks
from weft.strategy.data_parallel import apply_fsdp

[TOKENS] = token_batches(1, 37)
Term = Callable[[nn.Module], Tensor]


def _each(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _added(model: nn.Module) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total += parameter.pow(2).sum()
    return total


def _with_data(model: nn.Module) -> Tensor:
    """Return a term of a plain tensor, from the model's forward, and a sharded weight; both get gradients."""
    weight = model.layers[0].feed_forward.w1.weight
    hidden = model(TOKENS[0])[..., : weight.shape[1]]
    return F.linear(hidden, weight).square().mean()


TERMS: dict[str, Term] = {
    "sum of squares": lambda m: sum(p.pow(2).sum() for p in _each(m)),
    "sum from the right": lambda m: 0.5 * sum((p**2).sum() for p in _each(m)) + torch.ones((), dtype=torch.float64),
    "in place": _added,
    "stacked norms": lambda m: torch.stack([p.norm() for p in _each(m)]).norm(),
    "flattened": lambda m: torch.cat([p.flatten() for p in _each(m)]).pow(2).sum(),
    "a vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).square().mean(),
    "absolute values": lambda m: sum(p.abs().sum() for n, p in m.named_parameters() if "norm" not in n),
    "largest": lambda m: max(p.abs().max() for p in _each(m)),
    "functions of norms": lambda m: torch.norm(m.output.weight) + torch.linalg.vector_norm(m.output.weight, 1),
    "rows": lambda m: m.tok_embeddings.weight[torch.tensor([1, 5, 36])].square().sum(),
    "deviations": lambda m: sum(p.std() for p in _each(m)),
    "columns": lambda m: m.layers[0].attention.wq.weight.sum(0).square().sum(),
    "a product": lambda m: m(TOKENS[0]).square().mean() * (1 + m.layers[0].feed_forward.w2.weight.norm()),
    "with data": _with_data,
    "several meshes": lambda m: (m.norm.weight * m.layers[0].attention.wk.weight[0]).sum().square(),
}


def _model() -> nn.Module:
    torch.manual_seed(3)
    return Llama(LlamaArgs(dtype=torch.float64, n_kv_heads=4))


def _sharded(axes: tuple[str, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    model = _model()
    if "tensor_parallel" in axes:
        weft.parallelize(model, mesh["tensor_parallel"], "auto")
    if "data_parallel" in axes:
        apply_fsdp(model, mesh["data_parallel"])
    return model


LAYOUTS = [("tensor_parallel",), ("data_parallel",), ("data_parallel", "tensor_parallel")]


def _check_terms(axes: tuple[str, ...]) -> None:
    model, reference = _sharded(axes), _model()
    for name, term in TERMS.items():
        expected = term(reference)
        expected.backward()
        with weft.strategy.local_parameters():
            found = term(model)
            assert not isinstance(found, DTensor), name
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, msg=name)
            found.backward()
        for (path, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            if other.grad is None:
                assert parameter.grad is None or not bool(full(parameter.grad).count_nonzero()), (name, path)
                continue
            assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
            label = f"{name}, {path}"
            torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-10, atol=1e-13, msg=label)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("axes", LAYOUTS[:2])
def test_terms_over_parameters_match_one_device(rank: int, world_size: int, axes: tuple[str, ...]) -> None:
    _check_terms(axes)


@on_ranks(4)
def test_terms_over_parameters_on_two_axes_match_one_device(rank: int, world_size: int) -> None:
    _check_terms(LAYOUTS[2])


def _numbers(model: nn.Module) -> list[float]:
    """Return the results of the ways in which code reads Python numbers from tensors."""
    weight = model.layers[0].feed_forward.w1.weight
    return [
        weight.sum().item(),
        float(weight.detach().mean()),
        *torch.stack([p.detach().norm() for p in model.parameters()]).tolist(),
        *weight[3].tolist(),
        float(bool((weight > 0.2).any())),
        float(f"{weight.detach().sum():.12f}"),
        float(torch.tensor([weight.detach().std()])[0]),
    ]


@on_ranks(2)
@pytest.mark.parametrize("axes", LAYOUTS[:2])
def test_numbers_match_one_device(rank: int, world_size: int, axes: tuple[str, ...]) -> None:
    model, expected = _sharded(axes), _numbers(_model())
    with weft.strategy.local_parameters():
        assert _numbers(model) == pytest.approx(expected, rel=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("axes", LAYOUTS[:2])
def test_average_of_weights_matches_one_device(rank: int, world_size: int, axes: tuple[str, ...]) -> None:
    """Plain tensors are averaged with shards, and shards are overwritten by plain tensors."""
    model, reference = _sharded(axes), _model()
    for each in (model, reference):
        with torch.no_grad(), weft.strategy.local_parameters():
            average = [torch.zeros(p.shape, dtype=p.dtype) for p in each.parameters()]
            for mean, parameter in zip(average, each.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5)
                parameter.mul_(2).add_(mean).sub_(parameter.mean())
                parameter.copy_(parameter - mean.cumsum(0))
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), other, rtol=1e-12, atol=1e-14, msg=name)


@on_ranks(2)
def test_unsupported_reads_and_writes_raise(rank: int, world_size: int) -> None:
    model = _sharded(LAYOUTS[0])
    weight = model.layers[0].feed_forward.w1.weight
    with pytest.raises(ValueError, match=r"a number was read from a DTensor .* inside weft.strategy.local_parameters"):
        weight.detach().sum().item()
    with weft.strategy.local_parameters(), torch.no_grad():
        with pytest.raises(ValueError, match=r"would change a sharded tensor .*; pass a tensor of the same shape"):
            weight.add_(torch.ones(weight.shape[1], dtype=weight.dtype))
        with pytest.raises(ValueError, match=r"^max would write 2 sharded tensors .*; compute out of place\.$"):
            torch.max(torch.ones(2, 3), 0, out=(weight, weight))


@on_ranks(2)
def test_mode_is_off_inside_forwards(rank: int, world_size: int) -> None:
    """The mode is off inside a parallelized forward, and on again afterwards."""
    from torch.overrides import _get_current_function_mode

    seen = []
    model = _sharded(LAYOUTS[0])
    model.norm.register_forward_hook(lambda *_: seen.append(_get_current_function_mode()))
    with weft.strategy.local_parameters():
        outside = _get_current_function_mode()
        model(TOKENS[0])
        assert _get_current_function_mode() is outside is not None
    assert seen == [None] and _get_current_function_mode() is None

"""Checks one random call on this rank: it matches the unsharded computation, or raises one of weft's own errors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ops.fuzz.draws import FLOATS, Draw, RankInGroup, Value, constant_along_first_dim, laid_out, local_shard
from ops.fuzz.operator import UNKNOWN_GROUP, Call


def check(call: Call, rank: int, groups: dict[str, str], device: str = "cpu") -> str:
    """Return "agreed", "raised" or "CPU only"; raise AssertionError with the call in its text if a check fails.

    "CPU only" is a call that must raise on the CPU, but that other devices accept, because they do not read values.
    """
    rank_in_group = call.rank_in_group(rank)
    if device != "cpu" and any(error.reads_values for errors in call.expected_errors for error in errors):
        return "CPU only"
    try:
        if call.expected_errors[rank_in_group.rank]:
            _check_error(call, rank_in_group, groups, device)
            return "raised"
        _check_values(call, rank_in_group, groups, device)
    except Exception as error:
        found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{found}\n{call}") from error
    return "agreed"


def _run(call: Call, arguments: dict[str, object], groups: dict[str, str]) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(call.mode != "no_grad"):
        return call.operator.run(arguments | {"group_name": groups[call.group]})


def _check_error(call: Call, rank_in_group: RankInGroup, groups: dict[str, str], device: str) -> None:
    indexed_device = torch.empty(0, device=device).device
    expected = [each.on(indexed_device) for each in call.expected_errors[rank_in_group.rank]]
    try:
        _run(call, call.arguments_of(rank_in_group, device), groups | {UNKNOWN_GROUP: UNKNOWN_GROUP})
    except Exception as error:
        text = str(error)
        is_known = any(type(error) is each.error and each.text in text for each in expected)
        assert is_known, f"{type(error).__name__}: {text}; expected one of {expected}"
        is_sentence = text.startswith(f"weft::{call.operator.name}: got ") and text.endswith(".") and "\n" not in text
        assert is_sentence, f"not a sentence that begins with the operator's name and 'got': {text}"
        return
    raise AssertionError(f"the call succeeded; expected one of {expected}")


def _check_values(call: Call, rank_in_group: RankInGroup, groups: dict[str, str], device: str) -> None:
    operator = call.operator
    expected = _Expected(call)
    arguments = call.arguments_of(rank_in_group, device)
    before = {name: value.detach().clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    results = _run(call, arguments, groups)

    leaves = {name: arguments[name] for name in sorted(call.requires_grad)}
    dtype = operator.result_dtype(call.values)
    assert len(results) == len(expected.results)
    for index, result in enumerate(results):
        assert result.dtype == dtype, f"result of {result.dtype} instead of {dtype}"
        assert result.device.type == device, f"result on {result.device} instead of {device}"
        assert result.requires_grad == (bool(leaves) and call.mode != "no_grad")
        for name in before:
            same = result.untyped_storage().data_ptr() == arguments[name].untyped_storage().data_ptr()
            assert not same or result.numel() == 0, f"the result shares the memory of {name}"
        expected.compare(result.detach(), expected.result_on(rank_in_group, index), f"result {index}")
    if leaves and call.mode != "no_grad":
        graded = [results[index] for index in call.graded]
        grads = [laid_out(expected.grad_on(rank_in_group, index).to(device), call.grad_layout) for index in call.graded]
        if call.mode == "backward":
            torch.autograd.backward(graded, grads)
            input_grads = {name: leaf.grad for name, leaf in leaves.items()}
        else:
            tensors = torch.autograd.grad(graded, [leaves[name] for name in call.wanted], grads)
            input_grads = dict(zip(call.wanted, tensors, strict=True))
        for name, grad in input_grads.items():
            assert grad.dtype == leaves[name].dtype, f"gradient of {name} of {grad.dtype}"
            expected.compare(grad, expected.input_grad_on(rank_in_group, name), f"gradient of {name}")
    for name, value in before.items():
        assert torch.equal(arguments[name].detach(), value), f"{name} has changed"


class _Expected:
    """The unsharded computation of a call in float64, from the same values, with gradients."""

    def __init__(self, call: Call) -> None:
        operator = call.operator
        self._call = call
        self._placements = call.placements()
        self._result_placements = operator.results(call.values, call.options)
        ranks_in_group = [RankInGroup(call.num_ranks, rank) for rank in range(call.num_ranks)]
        leaves = {name: _map(value, _as_leaf) for name, value in call.values.items()}
        self._dtype = _dtype_of(call)
        given, options = SimpleNamespace(**leaves), SimpleNamespace(**call.options, dtype=self._dtype)
        self.results = operator.reference(given, options, ranks_in_group)

        draw = Draw(call.seed + 1)
        dtype = operator.result_dtype(call.values)
        values = [_map(result, lambda each: draw.values(each.shape, dtype)) for result in self.results]
        if call.grad_layout == "expanded":
            # NOTE: applies to the full gradient, so that each of its shards can be laid out with a stride of 0.
            values = [constant_along_first_dim(value) for value in values]
        self._grads = values

        total = sum(
            (one * grad.double()).sum()
            for index in call.graded
            for one, grad in zip(_listed(self.results[index]), _listed(values[index]), strict=True)
        )
        differentiable = [(name, leaf) for name in sorted(call.requires_grad) for leaf in _listed(leaves[name])]
        if isinstance(total, Tensor) and total.requires_grad and differentiable:
            tensors = [leaf for _, leaf in differentiable]
            grads = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
        else:
            grads = tuple(torch.zeros_like(leaf) for _, leaf in differentiable)
        self._input_grads: dict[str, Value] = {}
        for name in call.requires_grad:
            own_grads = [grad for (leaf_name, _), grad in zip(differentiable, grads, strict=True) if leaf_name == name]
            self._input_grads[name] = own_grads if isinstance(call.values[name], list) else own_grads[0]

        all_values = [*self.results, *self._input_grads.values(), *values, *call.values.values()]
        self._scale = max([1.0, *(_largest(one) for value in all_values for one in _listed(value))])

    def result_on(self, rank_in_group: RankInGroup, index: int) -> Tensor:
        return local_shard(_detached(self.results[index]), self._result_placements[index], rank_in_group)

    def grad_on(self, rank_in_group: RankInGroup, index: int) -> Tensor:
        return local_shard(self._grads[index], self._result_placements[index], rank_in_group)

    def input_grad_on(self, rank_in_group: RankInGroup, name: str) -> Tensor:
        return local_shard(self._input_grads[name], self._placements[name], rank_in_group)

    def compare(self, actual: Tensor, expected: Tensor, what: str) -> None:
        assert actual.shape == expected.shape, f"{what} of shape {list(actual.shape)}, expected {list(expected.shape)}"
        ours, wanted = actual.cpu().double(), expected.double()
        is_nonfinite = ~wanted.isfinite()
        assert torch.equal(ours.isfinite(), wanted.isfinite()), f"{what}: {ours}, expected {wanted}"
        error = (ours - wanted).masked_fill(is_nonfinite, 0).abs().max().item() if ours.numel() else 0.0
        operator = self._call.operator
        dtype = actual.dtype if operator.tolerates_by_result else self._dtype
        bound = operator.tolerances.get(dtype, 0.0) * self._scale
        assert error <= bound, f"{what} is off by {error:.2e}, more than {bound:.2e}"


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_() if tensor.dtype in FLOATS else tensor.detach()


def _map(value: Value, function) -> Value:
    if isinstance(value, list):
        return [function(each) for each in value]
    return None if value is None else function(value)


def _listed(value: Value) -> list[Tensor]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _detached(value: Value) -> Value:
    return _map(value, lambda tensor: tensor.detach())


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    return tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _dtype_of(call: Call) -> torch.dtype:
    """Return the first floating-point dtype of the call's tensors, or int64 if there is none."""
    dtypes = [one.dtype for value in call.values.values() for one in _listed(value)]
    return next((dtype for dtype in dtypes if dtype in FLOATS), torch.int64)

"""Experts that compute the tokens of a rank in two halves: one half moves while the other is computed.

Both halves are dispatched first. While the first is computed, the second is in flight to its experts; while the second
is computed, the results of the first return. The backward runs in reverse, with the same overlap: autograd runs the
nodes that are ready in the reverse order of their forward. One all-to-all exchanges the counts of both halves.

An exchange is two autograd nodes, one that starts it and one that waits for it. Between them, a token, a tensor without
elements, takes the place of the rows, since the gradient of rows in flight is in flight, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OPS = torch.ops.weft
Compute = Callable[[Tensor, Tensor], Tensor]


class _Flight:
    """The rows of an exchange in flight, or the gradients of rows."""

    def __init__(self) -> None:
        self._pending: Any = None

    def start(self, pending: Any) -> None:
        self._pending = pending

    def wait(self) -> Tensor:
        pending, self._pending = self._pending, None
        rows: Tensor = pending.wait()
        return rows


class _Routes(NamedTuple):
    """Those of one half, as in `weft.ops.DispatchedRows`, and the name of the group."""

    order: Tensor
    sent: Tensor
    received: Tensor
    group_name: str


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight, *routes: Any) -> Tensor:
        order, sent, received, group_name = routes
        ctx.save_for_backward(order)
        ctx.flight, ctx.num_tokens = flight, x.size(0)
        flight.start(_OPS._moe_start_dispatch(x, order, None, sent, received, group_name))
        return x.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return _OPS._moe_sum(ctx.flight.wait(), *ctx.saved_tensors, ctx.num_tokens, None), *[None] * 5


class _WaitForDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _Flight, *routes: Any) -> Tensor:
        _, sent, received, ctx.group_name = routes
        ctx.save_for_backward(sent, received)
        ctx.flight = flight
        return flight.wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.start(_OPS._moe_start_return(grad, *ctx.saved_tensors, ctx.group_name))
        return grad.new_empty(0), *[None] * 5


class _StartReturn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight, *routes: Any) -> Tensor:
        _, sent, received, group_name = routes
        ctx.flight = flight
        flight.start(_OPS._moe_start_return(rows, sent, received, group_name))
        return rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.wait(), *[None] * 5


class _WaitForReturn(torch.autograd.Function):
    """Returns the sum of the rows over the choices of each token, times `weights`."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weights: Tensor, flight: _Flight, *routes: Any) -> Tensor:
        order, sent, received, ctx.group_name = routes
        returned = flight.wait()
        ctx.save_for_backward(weights, order, sent, received, *([returned] if ctx.needs_input_grad[1] else []))
        ctx.flight = flight
        result: Tensor = _OPS._moe_sum(returned, order, weights.size(0), weights)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, order, sent, received, *returned = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            ctx.flight.start(_OPS._moe_start_dispatch(grad, order, weights, sent, received, ctx.group_name))
        grad_weights = _OPS._moe_weight_grad(grad, *returned, order, weights) if returned else None
        return grad.new_empty(0), grad_weights, *[None] * 5


@dataclasses.dataclass
class _Half:
    """One half of the tokens."""

    x: Tensor
    weights: Tensor
    counts: Tensor
    routes: _Routes

    def __post_init__(self) -> None:
        self._flight = _Flight()
        self._token: Tensor

    def start_dispatch(self) -> None:
        self._token = _StartDispatch.apply(self.x, self._flight, *self.routes)

    def compute(self, compute: Compute) -> None:
        """Compute the half's rows when they have arrived, and start to return the results."""
        rows = _WaitForDispatch.apply(self._token, self._flight, *self.routes)
        results = compute(rows, self.counts)
        self.weights = weights_for(results, self.weights)
        self._flight = _Flight()
        self._token = _StartReturn.apply(results, self._flight, *self.routes)

    def finish(self) -> Tensor:
        result: Tensor = _WaitForReturn.apply(self._token, self.weights, self._flight, *self.routes)
        return result


def weights_for(results: Tensor, weights: Tensor) -> Tensor:
    """Return the weights in a dtype in which results can be combined."""
    if weights.dtype == torch.float32 and results.dtype != torch.float64:
        return weights
    return weights.to(results.dtype)


def exchange_in_halves(
    compute: Compute, x: Tensor, expert_ids: Tensor, weights: Tensor, *, num_experts: int, group_name: str
) -> Tensor:
    """Return the sum of the experts' results for tokens x `[n, h]`, times their weights: `[n, h]`.

    Shapes: expert_ids, weights `[n, k]`. `compute`: returns the results `[m, h]` of this rank's experts for rows
    `[m, h]`, sorted by expert, and the number of rows of each expert; it is called twice. A rank may have no tokens.

    Forward: one all-to-all of counts and four of rows; backward: four of rows.
    """
    sizes = [x.size(0) - x.size(0) // 2, x.size(0) // 2]
    tokens_of_halves, ids_of_halves, weights_of_halves = (each.split(sizes) for each in (x, expert_ids, weights))
    counts, *routes = _OPS._moe_routes(list(ids_of_halves), num_experts, group_name)
    halves = [
        _Half(tokens, own_weights, own_counts, _Routes(order, sent, received, group_name))
        for tokens, own_weights, own_counts, order, sent, received in zip(
            tokens_of_halves, weights_of_halves, counts, *routes, strict=True
        )
    ]
    for half in halves:
        half.start_dispatch()
    for half in halves:
        half.compute(compute)
    return torch.cat([half.finish() for half in halves])

"""Mixture of experts: the choice of experts, the exchange of tokens over a group, and the experts' linear layers.

A layer on the ranks of a group, each of which has its own tokens x `[n, h]` and its shard of the experts:

    weights, expert_ids = weft.ops.route(router(x), top_k=2)
    rows, counts, *routes = weft.ops.moe_dispatch(x, expert_ids, num_experts=64, group_name=group)
    rows = weft.ops.grouped_linear(rows, w1, counts).relu()
    rows = weft.ops.grouped_linear(rows, w2, counts)
    y = weft.ops.moe_combine(rows, weights, *routes, group_name=group)

All functions are also in `weft.ops`, whose docstring has the rules that all operators share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from weft.nn.shard import group_size_and_rank, shard_range

Score = Literal["softmax", "sigmoid"]


class DispatchedRows(NamedTuple):
    """The rows of this rank's experts, and the routes that `moe_combine` takes them back on.

    A pair is a token and one of its k experts; pair t * k + c is choice c of token t.
    """

    rows: Tensor
    """`[m, h]`, sorted by expert, then by the rank of the token, then by pair."""
    counts: Tensor
    """int64 `[experts of this rank]`: the number of rows of each."""
    order: Tensor
    """int64 `[n * k]`: the pairs of this rank's tokens, sorted by expert, then by pair."""
    sent: Tensor
    """int64 `[ranks]` on the CPU: the number of pairs for each rank."""
    received: Tensor
    """int64 `[ranks, experts of this rank]` on the CPU: the number of rows from each rank for each expert."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias with the weight of each row's expert: `[m, in]` -> `[m, out]`.

    Shapes: x `[m, in]` has the rows of expert 0 first, then those of expert 1, and so on; weight `[experts, out, in]`;
    counts int64 `[experts]` has the number of rows of each expert, also 0, with the sum m; bias `[experts, out]`. No
    communication. Saves x for the gradient of weight. Experts without rows get zeros as gradients.

    On CUDA, bfloat16 with sizes in and out that are multiples of 8 uses torch's grouped product: the host does not read
    the counts, which are then not checked. Otherwise it waits for them.

    Raises:
        ValueError: the shapes do not match, or the sum of the counts is not m.
        TypeError: x, weight and bias are no floating-point tensors of one dtype, or counts are not int64.

    Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022).
    """
    return torch.ops.weft.grouped_linear(x, weight, counts, bias)


def moe_dispatch(x: Tensor, expert_ids: Tensor, *, num_experts: int, group_name: str) -> DispatchedRows:
    """Send each token to the experts that are chosen for it; return the rows of this rank's experts.

    Shapes: x `[n, h]`, this rank's tokens, of which ranks may have different numbers, also 0; expert_ids int64 or int32
    `[n, k]`, the experts of each token; for the results see `DispatchedRows`. The num_experts experts are sharded over
    the ranks of the group like torch.chunk; later ranks may have fewer experts, or none. There is no capacity: no token
    is dropped, and a rank has as many rows as are sent to it.

    Forward: one all-to-all of num_experts counts, which the host reads, and one of the rows. Backward: one all-to-all;
    the gradient of a token is summed over its k rows, in float32 for half precision. In a group of one rank there is no
    communication. Saves `order`, `sent` and `received`.

    Where a graph is traced, the number of rows on several ranks is an unbacked size. torch.compile needs
    `torch._dynamo.config.capture_dynamic_output_shape_ops = True` to have the operator in a graph, and otherwise breaks
    the graph there.

    Raises:
        ValueError: the shapes do not match, or num_experts is less than 1.
        TypeError: x is no floating-point tensor, or expert_ids are neither int64 nor int32.
        IndexError: an id of any rank is not from 0 to num_experts - 1; raised on all ranks, after the counts' exchange.
        NotImplementedError: the tensors are on the device meta, and the group has several ranks.

    Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding" (2020); without
    a capacity as in Gale et al., "MegaBlocks" (2022).
    """
    return DispatchedRows(*torch.ops.weft.moe_dispatch(x, expert_ids, num_experts=num_experts, group_name=group_name))


def moe_combine(
    rows: Tensor, weights: Tensor, order: Tensor, sent: Tensor, received: Tensor, *, group_name: str
) -> Tensor:
    """Return the rows of the experts to the ranks of their tokens, and sum them with weights: `[m, h]` -> `[n, h]`.

    The inverse of `moe_dispatch`, which returns `order`, `sent` and `received`. rows `[m, h]` are the results of this
    rank's experts, in the order of its rows; h may be another size than there, the same on all ranks. Row t of the
    result is the sum over the k choices of weights[t, c] times the row of the pair, in float32 for half precision.
    weights `[n, k]` have the dtype of rows, or float32 if rows are of half precision.

    Forward: one all-to-all of the rows; backward: one, if rows require a gradient. Saves weights, `order`, `sent`,
    `received` and, if weights require a gradient, the returned rows `[n * k, h]`.

    Raises:
        ValueError: the shapes do not match, or `order`, `sent` and `received` do not fit together; the values of
            `order` are checked on the CPU only.
        TypeError: rows and weights are no floating-point tensors of these dtypes, or the others are not int64.

    Lepikhin et al., "GShard" (2020).
    """
    return torch.ops.weft.moe_combine(rows, weights, order, sent, received, group_name=group_name)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the weights `[n, k]` and the ids int64 `[n, k]` of the k experts that are chosen for each token.

    logits `[n, experts]` are those of the router. The scores are their softmax over the experts or their sigmoid,
    computed in float32 (float64 for float64). The experts with the top_k highest scores + bias are chosen, in this
    order; bias `[experts]` has no part in the weights, and gets no gradient. The weights are the scores of the chosen
    experts, with `normalize` divided by their sum, times `scale`.

    With `num_groups`, the experts are divided into that many groups of neighbours, and only experts of the `top_groups`
    groups with the highest sums of their two highest scores + bias are chosen.

    Equal scores are chosen in the order of the experts, so that the choice is deterministic.

    Raises:
        ValueError: a shape does not match, an option has another value, or there are fewer experts than are chosen.
        TypeError: logits are no floating-point tensor.

    The groups and the bias are those of DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024); softmax with `normalize` is
    Mixtral's router.
    """
    _check_route(logits, top_k, score, bias, num_groups, top_groups)
    num_experts = logits.size(1)
    precise = logits if logits.dtype == torch.float64 else logits.float()
    scores = precise.softmax(-1) if score == "softmax" else precise.sigmoid()
    with torch.no_grad():
        choice = scores if bias is None else scores + bias
        if num_groups is not None and top_groups is not None:
            grouped = choice.unflatten(-1, (num_groups, num_experts // num_groups))
            group_scores = _highest(grouped, min(2, grouped.size(-1)))[0].sum(-1)
            is_chosen = torch.zeros_like(group_scores, dtype=torch.bool)
            is_chosen.scatter_(-1, _highest(group_scores, top_groups)[1], value=True)
            choice = grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        expert_ids = _highest(choice, top_k)[1]
    weights = scores.gather(-1, expert_ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights * scale, expert_ids


def load_balancing_loss(probabilities: Tensor, expert_ids: Tensor, num_experts: int) -> Tensor:
    """Return num_experts times the sum over the experts of (share of tokens) * (mean probability), a number.

    probabilities `[n, num_experts]` are the router's softmax for each token; expert_ids `[n, k]` the chosen experts.
    The share of an expert is the number of times that it is chosen, divided by n: the loss is k if all experts are
    chosen equally often, and larger if not. It is 0 without tokens. The gradient is that of the probabilities. The
    tokens are those of this rank.

    Raises:
        ValueError: the shapes do not match.

    Fedus, Zoph, Shazeer, "Switch Transformers" (2021), equations 4 to 6; with k experts per token as in Mixtral.
    """
    num_tokens = probabilities.size(0) if probabilities.dim() else 0
    if probabilities.dim() != 2 or expert_ids.dim() != 2 or probabilities.size(1) != num_experts:
        raise ValueError(
            f"weft.ops.load_balancing_loss: got probabilities of shape {list(probabilities.shape)} and expert_ids of "
            f"shape {list(expert_ids.shape)} with num_experts {num_experts}; pass [tokens, num_experts] and "
            "[tokens, choices]."
        )
    if expert_ids.size(0) != num_tokens:
        raise ValueError(
            f"weft.ops.load_balancing_loss: got {num_tokens} tokens of probabilities and {expert_ids.size(0)} of "
            "expert_ids; pass both for the same tokens."
        )
    experts = torch.arange(num_experts, device=expert_ids.device)
    counts = (expert_ids.flatten().unsqueeze(1) == experts).sum(0)
    divisor = max(num_tokens, 1)
    shares = counts.to(probabilities.dtype) / divisor
    return num_experts * (shares * (probabilities.sum(0) / divisor)).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean over the tokens of the squared log-sum-exp of logits `[n, experts]`, a number; 0 without tokens.

    It keeps the logits of a router small. Computed in float32 (float64 for float64).

    Raises:
        ValueError: logits are no matrix.

    Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models" (2022), equation 5.
    """
    if logits.dim() != 2:
        raise ValueError(
            f"weft.ops.router_z_loss: got logits of shape {list(logits.shape)}; pass those of the router, "
            "[tokens, experts]."
        )
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return precise.logsumexp(-1).square().sum() / max(logits.size(0), 1)


def _highest(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the highest values along the last dim and their indices; equal values in the order of their indices."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :number], indices[..., :number]


def _check_route(
    logits: Tensor,
    top_k: int,
    score: str,
    bias: Tensor | None,
    num_groups: int | None,
    top_groups: int | None,
) -> None:
    name = "weft.ops.route"
    if not logits.is_floating_point():
        raise TypeError(f"{name}: got logits of dtype {logits.dtype}; pass a floating-point tensor.")
    if logits.dim() != 2:
        raise ValueError(
            f"{name}: got logits of shape {list(logits.shape)}; pass those of the router, [tokens, experts]."
        )
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"{name}: got score {score!r}; pass 'softmax' or 'sigmoid'.")
    num_experts = logits.size(1)
    if bias is not None and list(bias.shape) != [num_experts]:
        raise ValueError(
            f"{name}: got bias of shape {list(bias.shape)} with logits of shape {list(logits.shape)}; pass one number "
            "for each expert."
        )
    num_candidates = num_experts
    if num_groups is not None or top_groups is not None:
        if num_groups is None or top_groups is None:
            raise ValueError(f"{name}: got num_groups {num_groups} with top_groups {top_groups}; pass both or neither.")
        if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise ValueError(
                f"{name}: got num_groups {num_groups} and top_groups {top_groups} with {num_experts} experts; pass a "
                "number of groups that divides that of the experts, and at most as many top_groups."
            )
        num_candidates = num_experts // num_groups * top_groups
    if not 1 <= top_k <= num_candidates:
        raise ValueError(
            f"{name}: got top_k {top_k} with {num_candidates} experts to choose from; pass one from 1 to that number."
        )


# ---- fake kernels: the number of rows of a rank depends on values, and counts are on the CPU on every device --------


def _register_fake(name: str, fake: Callable[..., Any]) -> None:
    register: Any = torch.library.register_fake  # which torch does not annotate as a decorator
    register(f"weft::{name}", fake)


def _host_counts(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")


def _dispatch_fake(
    x: Tensor, expert_ids: Tensor, num_experts: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_ranks, rank = group_size_and_rank(group_name)
    num_own = shard_range(num_experts, num_ranks, rank)[1]
    num_rows: int | torch.SymInt = expert_ids.numel()
    if num_ranks > 1 and x.is_meta:
        raise NotImplementedError(
            f"weft::moe_dispatch: got tensors on meta in a group of {num_ranks} ranks, where the number of rows "
            "depends on values; pass fake tensors (torch.compile, torch.export), or a group of one."
        )
    if num_ranks > 1:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(num_rows, x.size(1)),
        expert_ids.new_empty(num_own, dtype=torch.int64),
        expert_ids.new_empty(expert_ids.numel(), dtype=torch.int64),
        _host_counts(num_ranks),
        _host_counts(num_ranks, num_own),
    )


def _dispatch_backward_fake(
    grad_rows: Tensor, order: Tensor, sent: Tensor, received: Tensor, num_tokens: int, group_name: str
) -> Tensor:
    return grad_rows.new_empty(num_tokens, grad_rows.size(1))


def _combine_fake(
    rows: Tensor, weights: Tensor, order: Tensor, sent: Tensor, received: Tensor, group_name: str
) -> tuple[Tensor, Tensor]:
    is_alone = group_size_and_rank(group_name)[0] == 1
    returned = rows.new_empty(0) if is_alone else rows.new_empty(order.size(0), rows.size(1))
    return rows.new_empty(weights.size(0), rows.size(1)), returned


def _combine_backward_fake(
    grad_y: Tensor,
    weights: Tensor,
    returned: Tensor,
    order: Tensor,
    sent: Tensor,
    received: Tensor,
    num_rows: int,
    group_name: str,
    wants_rows: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor]:
    grad_rows = grad_y.new_empty(num_rows, grad_y.size(1)) if wants_rows else grad_y.new_empty(0)
    return grad_rows, weights.new_empty(weights.shape if wants_weights else (0,))


_register_fake("_moe_dispatch", _dispatch_fake)
_register_fake("_moe_dispatch_backward", _dispatch_backward_fake)
_register_fake("_moe_combine", _combine_fake)
_register_fake("_moe_combine_backward", _combine_backward_fake)

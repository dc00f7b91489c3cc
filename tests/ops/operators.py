"""The operators' sample calls and their unsharded references, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn.shard import group_size_and_rank

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass
class Call:
    """One call of an operator on a group of one."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.weft, self.name).default


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# Operators whose host waits for the device, to read counts of rows.
READS_COUNTS = ("grouped_linear", "moe_dispatch", "moe_combine")
# Operators with results whose shapes depend on values in a group of several ranks: they raise for tensors on meta.
DYNAMIC_SHAPES = ("moe_dispatch",)
NEEDS_NCCL = ("ring_attention",)  # operators that raise NotImplementedError for CUDA tensors over gloo


def sample_calls(group_name: str = "", dtype: torch.dtype = torch.float64) -> list[Call]:
    """Return calls of every public operator but pipeline messages, in its main forms, with random tensors."""

    def random(*shape: int) -> Tensor:
        return _random(*shape, dtype=dtype)

    x, w1, w2, w3 = random(2, 3, 5), random(6, 5), random(4, 6), random(6, 5)
    b1, b2, b3 = random(6), random(4), random(6)
    group: dict[str, object] = {"group_name": group_name}
    # The routes of 6 pairs, which stay on this rank.
    num_ranks = group_size_and_rank(group_name)[0]
    sent, received = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros(num_ranks, 3, dtype=torch.int64)
    sent[0], received[0] = 6, torch.tensor([2, 0, 4])
    calls = [
        Call("column_row_mlp", (x, w1, w2, w3, b1, b2, b3), {"activation": "silu", **group}),
        Call("column_row_mlp", (x, w1, w2, w3), {"activation": "gelu", "recompute": True, **group}),
        Call("column_row_mlp", (x, w1, w2), {"activation": "gelu_tanh", **group}),
        Call("column_row_mlp", (x, w1, w2, None, b1, b2), {"activation": "silu", **group}),
        Call("column_row_mlp", (x, w1, w2, w3, b1, b2, b3), {"activation": "relu", "sequence_dim": 1, **group}),
        Call("column_row_mlp", (x, w1, w2), {"activation": "gelu", "sequence_dim": 0, "recompute": True, **group}),
        Call("column_linear", (x, w1, b1), group),
        Call("column_linear", (x, w1), group),
        Call("row_linear", (x, w1, b1), group),
        Call("row_linear", (x, w1), group),
        Call("all_gather_linear", (x, w1, b1), {"gather_dim": 1, **group}),
        Call("all_gather_linear", (x, w1), {"gather_dim": 0, **group}),
        Call("linear_reduce_scatter", (x, w1, b1), {"scatter_dim": -2, **group}),
        Call("linear_reduce_scatter", (x, w1), {"scatter_dim": 0, **group}),
        Call("sharded_linear", (x, w1, b1), group),
        Call("sharded_linear", (x, w1), group),
        Call("vocab_parallel_embedding", (torch.tensor([[0, 3], [1, 0]]), random(4, 5), 0), group),
        Call("vocab_parallel_cross_entropy", (x, torch.tensor([[0, 4, -100], [1, 1, 3]]), 0), group),
        Call(
            "vocab_parallel_cross_entropy",
            (x, torch.tensor([[0, 4, 2], [1, 1, 3]]), 0),
            {"label_smoothing": 0.1, "reduction": "none", **group},
        ),
        Call(
            "vocab_parallel_linear_cross_entropy",
            (x, w1, torch.tensor([[0, 4, 5], [1, -7, 3]]), 0),
            {"label_smoothing": 0.2, "reduction": "sum", "ignore_index": -7, **group},
        ),
        Call("rms_norm", (x, random(5)), group),
        Call("rms_norm", (x,), {"eps": 1e-3, **group}),
        Call("layer_norm", (x, random(5), random(5)), group),
        Call("layer_norm", (x, random(5)), {"eps": 0.1, **group}),
        Call("add_rms_norm", (x, random(2, 3, 5), random(5)), group),
        Call("add_layer_norm", (x, random(2, 3, 5), random(5), random(5)), group),
        Call("add_layer_norm", (x, random(2, 3, 5)), group),
        Call("join", (x, [torch.empty(0, requires_grad=True)])),
        Call("dropout", (x, torch.tensor([7], device="cpu")), {"p": 0.4, **group}),
        Call("dropout", (x, torch.tensor(-7, device="cpu")), {"p": 0.4, "dim": -2, **group}),
        Call("copy_to_group", (x, group_name)),
        Call("reduce_from_group", (x, group_name)),
        Call("scatter_to_group", (x, 1, group_name)),
        Call("gather_from_group", (x, -1, group_name)),
        Call("gather_from_sequence", (x, 1, group_name)),
        Call("reduce_scatter_to_sequence", (x, 0, group_name)),
        Call("all_to_all", (x, 2, 0, group_name)),
        Call("ulysses_attention", (random(1, 8, 3, 2), random(1, 4, 3, 2), random(1, 4, 3, 2)), group),
        Call(
            "ulysses_attention",
            (random(1, 8, 3, 2), random(1, 4, 3, 2), random(1, 4, 3, 2)),
            {"is_causal": True, "window": 2, "document_offsets": torch.tensor([0, 2]), **group},
        ),
        Call(
            "ulysses_attention",
            (random(1, 8, 4, 2), random(1, 4, 4, 2), random(1, 4, 4, 2)),
            {"order": "head_tail", "ring_group_name": "", **group},
        ),
        Call("ring_attention", (random(2, 4, 6, 3), random(2, 2, 6, 3), random(2, 2, 6, 3)), group),
        Call(
            "ring_attention",
            (random(2, 2, 4, 3), random(2, 2, 4, 3), random(2, 2, 4, 3)),
            {"is_causal": True, "scale": 0.5, "order": "contiguous", **group},
        ),
        Call(
            "ring_attention",
            (random(1, 2, 6, 3), random(1, 1, 6, 3), random(1, 1, 6, 3)),
            {"is_causal": True, "window": 2, "document_offsets": torch.tensor([0, 4]), **group},
        ),
        Call("grouped_linear", (random(6, 5), random(3, 4, 5), torch.tensor([2, 0, 4]), random(3, 4))),
        Call("grouped_linear", (random(6, 5), random(3, 4, 5), torch.tensor([2, 0, 4]))),
        Call("moe_dispatch", (random(3, 5), torch.tensor([[2, 0], [2, 2], [0, 3]])), {"num_experts": 4, **group}),
        Call("moe_combine", (random(6, 5), random(3, 2), torch.tensor([1, 4, 0, 2, 3, 5]), sent, received), group),
    ]
    return calls


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Return autocast for torch's default device."""
    return torch.autocast(torch.get_default_device().type, dtype=dtype)


def chunk(tensor: Tensor, dim: int, world_size: int, rank: int, requires_grad: bool = True) -> Tensor:
    """Return this rank's torch.chunk shard along `dim`, which may be empty, as a leaf."""
    length = -(-tensor.size(dim) // world_size)
    start = min(rank * length, tensor.size(dim))
    shard = tensor.detach().narrow(dim, start, min(start + length, tensor.size(dim)) - start)
    return shard.clone().requires_grad_(requires_grad)


def mlp_reference(x: Tensor, w: dict[str, Tensor], activation: str) -> Tensor:
    """Return the unsharded feed-forward block of x with weights w1, w2 and optional w3, b1, b2, b3."""
    h = ACTIVATIONS[activation](F.linear(x, w["w1"], w.get("b1")))
    if "w3" in w:
        h = h * F.linear(x, w["w3"], w.get("b3"))
    return F.linear(h, w["w2"], w.get("b2"))

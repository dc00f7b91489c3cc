"""Sharded sequences and the unsharded reference for the tests of ring_attention and ulysses_attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from weft import flight

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int


# Even and uneven shards, grouped-query heads, one key/value head, empty shards on some ranks, several of the blocks of
# torch's kernel, and no tokens at all.
SHAPES = (
    Shape(2, 4, 4, 24, 8),
    Shape(1, 4, 2, 37, 6),
    Shape(2, 3, 1, 10, 5),
    Shape(1, 2, 2, 3, 4),
    Shape(1, 2, 1, 1210, 4),
    Shape(1, 2, 2, 0, 4),
)


def chunks_of(size: int, num_ranks: int, rank: int, order: str) -> list[range]:
    """Return the positions of the tokens of each chunk of a rank."""
    num_chunks = 2 * num_ranks if order == "head_tail" else num_ranks
    length = -(-size // num_chunks)
    chunks = [range(min(i * length, size), min((i + 1) * length, size)) for i in range(num_chunks)]
    return [chunks[rank], chunks[-1 - rank]] if order == "head_tail" else [chunks[rank]]


def tokens_of(size: int, num_ranks: int, rank: int, order: str) -> list[int]:
    """Return the positions of a rank's tokens."""
    return [token for each in chunks_of(size, num_ranks, rank, order) for token in each]


class Reference:
    """Unsharded attention in float64, from values that are numbers of `dtype`, with its gradients."""

    def __init__(
        self,
        shape: Shape,
        *,
        is_causal: bool,
        scale: float | None = None,
        window: int | None = None,
        document_offsets: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        torch.manual_seed(shape.tokens)
        heads = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
        self.inputs = {
            name: torch.randn(shape.batch, number, shape.tokens, shape.head_dim).to(dtype).double().requires_grad_()
            for name, number in heads.items()
        }
        query, key, value = self.inputs.values()
        mask = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool)
        if is_causal:
            mask = mask.tril()
        if window is not None:
            mask = mask.triu(1 - window)
        if document_offsets is not None:
            positions = torch.arange(shape.tokens, device="cpu")
            documents = torch.bucketize(positions, document_offsets.cpu(), right=True).to(mask.device)
            mask = mask & (documents[:, None] == documents)
        self.out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=shape.heads != shape.kv_heads
        )
        self.grad_out = torch.randn_like(self.out).to(dtype).double()
        self.out.backward(self.grad_out)
        self._dtype = dtype

    def local(self, tokens: list[int]) -> dict[str, Tensor]:
        """Return the inputs at the positions of a rank's tokens, as leaves."""
        return {
            name: tensor.detach()[:, :, tokens].to(self._dtype).requires_grad_() for name, tensor in self.inputs.items()
        }

    def check(self, out: Tensor, local: dict[str, Tensor], tokens: list[int], tolerance: float) -> None:
        """Run the backward from a rank's result; compare the result and the gradients."""
        out.backward(self.grad_out[:, :, tokens].to(self._dtype))
        pairs = {"out": (out, self.out)}
        pairs |= {f"gradient of {name}": (tensor.grad, self.inputs[name].grad) for name, tensor in local.items()}
        for name, (actual, full) in pairs.items():
            expected = full[:, :, tokens]
            assert actual.dtype is self._dtype and actual.shape == expected.shape, name
            if expected.numel():
                error = (actual.double() - expected).abs().max().item()
                assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name} is off by {error:.2e}"


def computed_pairs(run: Callable[[], object]) -> int:
    """Return the number of pairs of a query and a key in the calls of torch's forward kernel."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    shapes = [event.input_shapes for event in profiler.events() if event.name == name]
    return sum(each[0][2] * each[1][2] for each in shapes)


def messages_of(run: Callable[[], Result]) -> tuple[Counter[tuple[str, int]], Result]:
    """Return the messages and collectives of a call, by name and bytes, and its result."""
    before = max((each["begin"] for each in flight.calls()), default=0.0)
    result = run()
    calls = [each for each in flight.calls() if each["begin"] > before]
    return Counter((each["call"].partition("(")[0], each["bytes"]) for each in calls), result


def check_compiled(block: nn.Module, inputs: dict[int, Tensor]) -> dict[int, list[Tensor]]:
    """Compare the compiled block with the eager one; return the eager outputs and gradients by the key of the input."""
    eager = {tokens: _run(block, x) for tokens, x in inputs.items()}
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, x in inputs.items():
        for ours, expected in zip(_run(compiled, x), eager[tokens], strict=True):
            torch.testing.assert_close(ours, expected)
    return eager


def _run(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]

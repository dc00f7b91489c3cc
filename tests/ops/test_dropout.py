"""dropout: the mask depends only on the seed and the index in the unsharded tensor, for any sharding."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast, chunk
from ops.philox import dropout_mask, philox
from support.ranks import on_ranks


def _group() -> str:
    return dist.group.WORLD.group_name


def _dropout(x: Tensor, seed: int, p: float, **options: object) -> Tensor:
    return weft.ops.dropout(x, torch.tensor(seed, device="cpu"), p=p, **{"group_name": "", **options})


def test_known_answers() -> None:
    """A test vector of the authors of Philox4x32-10."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_module_traces_with_fake_cuda_tensors() -> None:
    """Tracing needs no GPU. Next to CUDA tensors, traced code accepts only CPU tensors without dims, like the seed."""
    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda")
        assert weft.nn.Dropout(0.5, group_name="", dim=None)(x).device == x.device


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_matches_philox_mask(dtype: torch.dtype) -> None:
    cases = [((7, 191), 5, 0.3), ((1025,), -1, 0.5), ((2, 3, 5), 1 << 62, 0.9), ((), 3, 0.5), ((0, 3), 1, 0.5)]
    for shape, seed, p in cases:
        x = torch.randn(shape).to(dtype).requires_grad_()
        mask = dropout_mask(x.shape, seed, p)
        expected = torch.where(mask, x.double() / (1 - p), 0.0)
        y = _dropout(x, seed, p)
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=0)
        assert y.dtype is dtype and torch.equal(y != 0, mask & (x != 0))
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        torch.testing.assert_close(grad.double(), mask.double() / (1 - p), rtol=2**-7, atol=0)


@on_ranks(1, 2, 3, 4)
def test_shards_match_unsharded(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    for shape, dim in [((7, 5), 0), ((2, 9, 6), 1), ((2, 3, 8), -1), ((3, 700), 1), ((1, 4), 0), ((4, 2, 0), 1)]:
        full = torch.randn(shape, requires_grad=True)
        y = _dropout(full, 11, 0.4)
        shard = chunk(full, dim, world_size, rank)
        options = {"dim": dim, "dim_size": full.size(dim), "group_name": _group()}
        local_y = collectives_of(lambda: _dropout(shard, 11, 0.4, **options), expected={})  # noqa: B023
        assert torch.equal(local_y, chunk(y, dim, world_size, rank))
        y.sum().backward()
        collectives_of(local_y.sum().backward, expected={})
        assert torch.equal(shard.grad, chunk(full.grad, dim, world_size, rank))
        assert torch.equal(_dropout(full, 11, 0.4, group_name=_group()), y)


def test_probabilities_seeds_and_special_values() -> None:
    x = torch.ones(200_000)
    for p in (0.05, 0.5, 0.95):
        first, other = _dropout(x, 1, p), _dropout(x, 2, p)
        dropped = (first == 0).double().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
        assert ((first == 0) == (other == 0)).double().mean() < 1 - p * (
            1 - p
        )  # masks of different seeds are not correlated
    assert torch.equal(_dropout(x, 1, 0.0), x) and _dropout(x, 1, 1.0).count_nonzero() == 0
    specials = _dropout(torch.full((1000,), float("nan")), 1, 0.5)
    assert (
        torch.equal(specials.isnan(), dropout_mask(torch.Size([1000]), 1, 0.5))
        and specials[~specials.isnan()].eq(0).all()
    )
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(_dropout(strided, 1, 0.5), _dropout(strided.contiguous(), 1, 0.5))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    three = _dropout(x, 1, 0.5)
    torch.set_num_threads(threads)
    assert torch.equal(three, _dropout(x, 1, 0.5))


def test_saves_no_mask() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with counted() as count:
        y = _dropout(x, 1, 0.5)
        assert count.now() - y.nbytes <= 64  # the seed


def test_second_derivative_is_correct() -> None:
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: _dropout(t, 3, 0.5) ** 2, (x,))


@on_ranks(2)
def test_invalid_arguments_raise(rank: int) -> None:
    x, seed = torch.ones(2, 4), torch.tensor([1], device="cpu")
    for error, text, call, options in [
        (ValueError, "weft::dropout: got p 1.5; pass a probability", (x, seed), {"p": 1.5}),
        (ValueError, "got p nan", (x, seed), {"p": float("nan")}),
        (TypeError, r"got seed of dtype Float and shape \[1\]", (x, seed.float()), {}),
        (TypeError, r"got seed of dtype Long and shape \[2\]", (x, seed.expand(2)), {}),
        (TypeError, "got x of dtype Long", (x.long(), seed), {}),
        (ValueError, "got dim_size 4 without dim", (x, seed), {"dim_size": 4}),
        (IndexError, "got dim 2", (x, seed), {"dim": 2}),
        (ValueError, rf"\[2, 4\] on rank {rank} of 2 with dim_size 9", (x, seed), {"dim": 0, "dim_size": 9}),
        (ValueError, "got group_name 'nowhere'", (x, seed), {"group_name": "nowhere"}),
    ]:
        with pytest.raises(error, match=text):
            weft.ops.dropout(*call, **{"p": 0.5, "group_name": _group(), **options})
    with pytest.raises(ValueError, match=r"Dropout: got p -0.1"):
        weft.nn.Dropout(-0.1, group_name="")


class Block(nn.Module):
    """A linear layer between a dropout of a sequence shard and one of a replicated tensor."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.sharded_dropout = weft.nn.Dropout(0.3, dim=1, group_name=group_name)
        self.linear = nn.Linear(6, 6)
        self.replicated_dropout = weft.nn.Dropout(0.5, group_name=group_name)

    def forward(self, x: Tensor) -> Tensor:
        return self.replicated_dropout(self.linear(self.sharded_dropout(x)))


@on_ranks(1, 2, timeout=300)
def test_module_compile_export_script_checkpoint(rank: int) -> None:
    torch.manual_seed(0)
    block = Block(_group())
    x = torch.randn(2, 5, 6)

    def run(module: nn.Module, tokens: int = 5) -> list[Tensor]:
        block.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        y = module(x[:, :tokens])
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in block.parameters())]

    eager = {tokens: run(block, tokens) for tokens in (3, 5)}
    assert eager[5][0].count_nonzero() < eager[5][0].numel()
    for actual, expected in zip(run(lambda x: checkpoint(block, x, use_reentrant=False)), eager[5], strict=True):
        torch.testing.assert_close(actual, expected)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in eager if dynamic else (3,):
            torch.testing.assert_close(run(compiled, tokens), eager[tokens])
    scripted = torch.jit.script(block)
    for _ in range(3):
        torch.testing.assert_close(run(scripted), eager[5])
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    assert weft.nn.rebind_group(loaded, dist.new_group().group_name) == 2
    program = torch.export.export(block, (x,), dynamic_shapes=({1: torch.export.Dim("s", min=2)},))
    assert [str(node.target) for node in program.graph.nodes].count("weft.dropout.default") == 2
    for module in (loaded, program.module()):
        torch.manual_seed(3)
        torch.testing.assert_close(module(x), eager[5][0])
    block.eval()
    torch.testing.assert_close(block(x), block.linear(x))
    block.train()
    with autocast(torch.bfloat16):
        assert block(x).dtype is torch.bfloat16

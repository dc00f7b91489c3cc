"""Cross-entropy over a sharded vocabulary: torch's losses and gradients, communication, memory, errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.operators import autocast, chunk
from support.ranks import on_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
# Tolerances for logits that the operator computes, in the dtype.
PRODUCT_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.15, "float16": 2e-2}
# (vocabulary size, shape of the targets): even and uneven shards, ranks without classes, one token, no tokens.
SIZES = [(8, (2, 3)), (7, (5,)), (2, (4,)), (11, ()), (6, (0,))]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"reduction": "sum", "ignore_index": 1},
    {"reduction": "none", "ignore_index": 0, "label_smoothing": 0.3},
]


def _group() -> str:
    return dist.group.WORLD.group_name


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float, label: str) -> None:
    assert actual.shape == expected.shape, label
    bounds = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(actual.double(), expected.double(), **bounds, msg=lambda text: f"{label}: {text}")


def _problem(vocab: int, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, output matrix, logits (around 50) and targets, equal on all ranks."""
    torch.manual_seed(3)
    torch_dtype = getattr(torch, dtype)
    x, weight = torch.randn(*shape, 4).to(torch_dtype), torch.randn(vocab, 4).to(torch_dtype)
    logits = (torch.randn(*shape, vocab) * 3 + 50).to(torch_dtype)
    target = torch.randint(0, vocab, shape)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return x, weight, logits, target


def _reference(logits: Tensor, target: Tensor, options: dict[str, object]) -> Tensor:
    classes = logits.reshape(-1, logits.size(-1)), target.reshape(-1)
    if options.get("ignore_index", -100) != -100:
        classes = classes[0], classes[1].masked_fill(classes[1] == -100, options["ignore_index"])
    loss = F.cross_entropy(*classes, **options)
    return loss.reshape(target.shape) if options.get("reduction") == "none" else loss


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_losses_and_gradients_match_torch(rank: int, world_size: int, dtype: str) -> None:
    for vocab, shape in SIZES:
        for options in OPTIONS:
            x, weight, logits, target = _problem(vocab, shape, dtype)
            ignored_target = target.masked_fill(target == -100, options.get("ignore_index", -100))
            start, _ = weft.nn.shard_range(vocab, world_size, rank)
            common = {"group_name": _group(), "vocab_size": vocab, **options}

            full = logits.double().requires_grad_()
            expected = _reference(full, target, options)
            grad = torch.ones(expected.shape).cumsum(-1).double() if expected.dim() else torch.tensor(1.5).double()
            expected.backward(grad)
            shard = chunk(logits, -1, world_size, rank)
            loss = weft.ops.vocab_parallel_cross_entropy(shard, ignored_target, start, **common)
            assert loss.dtype is (torch.float64 if dtype == "float64" else torch.float32)
            _assert_close(loss, expected, TOLERANCE[dtype], "loss")
            loss.backward(grad.to(loss.dtype))
            _assert_close(shard.grad, chunk(full.grad, -1, world_size, rank), TOLERANCE[dtype], "grad logits")

            full_x, full_weight = x.double().requires_grad_(), weight.double().requires_grad_()
            expected = _reference(full_x @ full_weight.t(), target, options)
            expected.backward(grad)
            local_x, rows = x.detach().clone().requires_grad_(), chunk(weight, 0, world_size, rank)
            loss = weft.ops.vocab_parallel_linear_cross_entropy(local_x, rows, ignored_target, start, **common)
            _assert_close(loss, expected, PRODUCT_TOLERANCE[dtype], "loss of the product")
            loss.backward(grad.to(loss.dtype))
            _assert_close(local_x.grad, full_x.grad, PRODUCT_TOLERANCE[dtype], "grad x")
            rows_grad = chunk(full_weight.grad, 0, world_size, rank)
            _assert_close(rows.grad, rows_grad, PRODUCT_TOLERANCE[dtype], "grad weight")


@on_ranks(2)
def test_number_of_collectives(rank: int) -> None:
    x, weight, _, target = _problem(8, (2, 3), "float32")
    logits = torch.ones(2, 3, 4, requires_grad=True)
    gather = {"all_gather_into_tensor": 1}
    common = {"group_name": _group(), "label_smoothing": 0.1}
    loss = collectives_of(lambda: weft.ops.vocab_parallel_cross_entropy(logits, target, 4 * rank, **common), gather)
    collectives_of(loss.backward, {})

    def linear(x: Tensor) -> Tensor:
        rows = chunk(weight, 0, 2, rank)
        return weft.ops.vocab_parallel_linear_cross_entropy(x, rows, target, 4 * rank, **common)

    loss = collectives_of(lambda: linear(x.requires_grad_()), gather)
    collectives_of(loss.backward, {"all_reduce": 1})
    collectives_of(linear(x.detach()).backward, {})


@on_ranks(2)
def test_memory_is_bounded(rank: int) -> None:
    """Besides inputs and results, both losses need some numbers per token; the linear one, a 32 MiB chunk of logits."""
    vocab, tokens = 32768, 1024
    target = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    common = {"group_name": _group(), "vocab_size": vocab}
    small = 64 * tokens  # some numbers per token
    logits = torch.ones(tokens, vocab // 2, requires_grad=True)
    with counted() as count:
        loss = weft.ops.vocab_parallel_cross_entropy(logits, target, rank * vocab // 2, **common)
        staging = count.now("communication")
        assert count.now() - staging <= 8 * tokens + 64  # two numbers per token
        assert count.peak() - staging <= small
        weft.memory.reset_peak()
        loss.backward()
        assert count.peak() - staging <= logits.nbytes + small  # the gradient itself

    x, weight = torch.randn(tokens, 64, requires_grad=True), torch.randn(vocab // 2, 64, requires_grad=True)
    with counted() as count:
        loss = weft.ops.vocab_parallel_linear_cross_entropy(x, weight, target, rank * vocab // 2, **common)
        staging = count.now("communication")
        assert count.now() - staging <= 8 * tokens + 64
        assert count.peak() - staging <= (32 << 20) + small
        weft.memory.reset_peak()
        loss.backward()
        staging = count.now("communication")
        assert count.peak() - staging <= (32 << 20) + x.nbytes + weight.nbytes + small


@on_ranks(2)
def test_chunked_losses_match_torch(rank: int) -> None:
    """There are more tokens than the 209 that a chunk of logits holds for 40000 classes per rank.

    The reference is float64. The gradient of x, in which the classes cancel, may be as inexact as torch's in float32.
    """
    vocab = 80000
    torch.manual_seed(0)
    x, weight = torch.randn(450, 3, dtype=torch.float32), torch.randn(vocab, 3)
    target = torch.randint(0, vocab, (450,))

    def unsharded(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden, matrix = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, weight))
        logits = hidden @ matrix.t()
        loss = F.cross_entropy(logits, target)
        return logits.detach(), loss, list(torch.autograd.grad(loss, [logits, hidden, matrix]))

    logits, _, (_, torchs_grad_x, _) = unsharded(torch.float32)
    _, expected, (grad_logits, grad_x, grad_weight) = unsharded(torch.float64)

    common = {"group_name": _group(), "vocab_size": vocab}
    start = rank * vocab // 2
    shard = chunk(logits, 1, 2, rank)
    loss = weft.ops.vocab_parallel_cross_entropy(shard, target, start, **common)
    loss.backward()
    _assert_close(loss, expected, 1e-5, "loss")
    torch.testing.assert_close(shard.grad.double(), chunk(grad_logits, 1, 2, rank), rtol=1e-4, atol=1e-9)
    x, rows = x.requires_grad_(), chunk(weight, 0, 2, rank)
    loss = weft.ops.vocab_parallel_linear_cross_entropy(x, rows, target, start, **common)
    loss.backward()
    _assert_close(loss, expected, 1e-5, "loss of the product")
    torch.testing.assert_close(rows.grad.double(), chunk(grad_weight, 0, 2, rank), rtol=1e-4, atol=1e-7)
    ours, torchs = (
        ((grad.double() - grad_x).abs() / (1e-7 + 1e-4 * grad_x.abs())).max() for grad in (x.grad, torchs_grad_x)
    )
    assert ours <= max(1, torchs)


@on_ranks(2)
def test_masked_and_large_logits_match_torch(rank: int) -> None:
    """A rank whose classes are all masked out contributes nothing; large logits lose no digits."""
    inf = float("inf")
    for dtype, rows in (
        (torch.float32, [[0.5, 1.0, -inf, -inf], [-inf, -inf, 2.0, 2.5], [10000.0, 10000.5, 9999.0, 10000.0]]),
        (torch.float64, [[1e8, 1e8 + 0.5, 1e8, 1e8 - 1]]),
    ):
        full = torch.tensor(rows, dtype=dtype).requires_grad_()
        target = torch.tensor([1, 3, 1][: len(rows)])
        expected = F.cross_entropy(full, target, reduction="none")
        expected.sum().backward()
        shard = chunk(full, 1, 2, rank)
        loss = weft.ops.vocab_parallel_cross_entropy(shard, target, 2 * rank, group_name=_group(), reduction="none")
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        loss.sum().backward()
        torch.testing.assert_close(shard.grad, chunk(full.grad, 1, 2, rank), rtol=1e-6, atol=1e-6)


LAYOUTS = pytest.mark.parametrize("layout", ["rows apart", "transposed"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _views(rank: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return logits that are not contiguous, this rank's shard of them, the targets, and the shard's first class."""
    vocab, tokens = 30002, 160
    torch.manual_seed(0)
    stored = torch.randn((tokens, vocab + 2) if layout == "rows apart" else (vocab, tokens)).to(dtype)
    full = stored[:, 1:-1] if layout == "rows apart" else stored.t()
    target = torch.randint(0, vocab, (tokens,))
    start = rank * vocab // 2
    shard = full.narrow(1, start, vocab // 2).detach().requires_grad_()
    assert not shard.is_contiguous()
    return full, shard, target, start


@on_ranks(2)
@LAYOUTS
@DTYPES
def test_noncontiguous_logits_match_torch(rank: int, layout: str, dtype: torch.dtype) -> None:
    full, shard, target, start = _views(rank, layout, dtype)
    reference = full.double().requires_grad_()
    expected = F.cross_entropy(reference, target, label_smoothing=0.1)
    expected.backward()
    options = {"group_name": _group(), "vocab_size": full.size(1), "label_smoothing": 0.1}
    loss = weft.ops.vocab_parallel_cross_entropy(shard, target, start, **options)
    loss.backward()
    _assert_close(loss, expected, 1e-5, "loss")
    tolerance = {"rtol": 1e-4 if dtype is torch.float32 else 4e-3, "atol": 1e-9}
    torch.testing.assert_close(shard.grad.double(), chunk(reference.grad, 1, 2, rank), **tolerance)


@on_ranks(2)
@LAYOUTS
@DTYPES
def test_copied_bytes_of_logits(rank: int, layout: str, dtype: torch.dtype) -> None:
    """Contiguous rows of strided logits are read in place; other logits are copied in chunks of 4 MiB."""
    full, shard, target, start = _views(rank, layout, dtype)
    options = {"group_name": _group(), "vocab_size": full.size(1), "label_smoothing": 0.1}
    with counted() as count:
        loss = weft.ops.vocab_parallel_cross_entropy(shard, target, start, **options)
        copied = 0 if layout == "rows apart" else 4 << 20
        assert count.peak() - count.now("communication") <= copied + 64 * target.numel()
    assert loss.isfinite()


@on_ranks(2)
def test_ignored_tokens_have_no_gradient(rank: int) -> None:
    logits = torch.full((3, 4), float("nan"))
    logits[1] = torch.tensor([float("inf"), 1.0, -float("inf"), 2.0])
    logits[2] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits.requires_grad_()
    target = torch.tensor([-100, -100, 3])
    loss = weft.ops.vocab_parallel_cross_entropy(logits, target, 4 * rank, group_name=_group())
    loss.backward()
    assert torch.equal(logits.grad[:2], torch.zeros(2, 4))
    assert loss.isfinite() and logits.grad[2].isfinite().all() and logits.grad[2].any()


def _check_error(rank: int, text: str, invalid: dict[str, object]) -> None:
    call = {"target": torch.tensor([0, 7]), "vocab_start": 4 * rank, "group_name": _group(), "vocab_size": 8}
    with pytest.raises((ValueError, TypeError, IndexError)) as caught:
        weft.ops.vocab_parallel_cross_entropy(torch.ones(2, 4), **(call | invalid))
    assert text in str(caught.value)


@on_ranks(2)
def test_errors_leave_group_usable(rank: int) -> None:
    for text, invalid in {
        "got target of shape [3] with logits of shape [2, 4]": {"target": torch.zeros(3, dtype=torch.int64)},
        "got target of dtype Float": {"target": torch.zeros(2)},
        "got label_smoothing 1.5; pass a number from 0 to 1": {"label_smoothing": 1.5},
        "got reduction 'average'; pass 'none', 'mean' or 'sum'": {"reduction": "average"},
        "got vocab_start -1": {"vocab_start": -1},
        "got 4 classes from vocab_start 6 on, with vocab_size 8": {"vocab_start": 6},
        "no process group of this process": {"group_name": "nowhere"},
    }.items():
        _check_error(rank, text, invalid)
    with pytest.raises(ValueError, match="got 4 logits per token and has 3 of 6 classes on this rank"):
        weft.nn.VocabParallelCrossEntropy(6, group_name=_group())(torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="whose second dim must be 3"):
        weft.ops.vocab_parallel_linear_cross_entropy(
            torch.ones(2, 3), torch.ones(4, 2), torch.tensor([0, 1]), 0, group_name=_group()
        )
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@on_ranks(2)
def test_targets_are_checked_before_communication(rank: int) -> None:
    """Targets are checked only on the CPU."""
    text = "got targets from 0 to 8; pass classes from 0 to vocab_size - 1 = 7"
    _check_error(rank, text, {"target": torch.tensor([0, 8])})
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


class Model(nn.Module):
    """A model with both losses."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.column = weft.nn.ColumnLinear(6, 11, group_name=group_name)
        self.loss = weft.nn.VocabParallelCrossEntropy(11, group_name=group_name, label_smoothing=0.1)
        self.head = weft.nn.VocabParallelLinearCrossEntropy(6, 11, group_name=group_name, reduction="sum")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.column(x), target) + self.head(x, target)


@on_ranks(1, 2, timeout=300)
def test_compile_export_script_and_autocast(rank: int) -> None:
    torch.manual_seed(rank)
    model = Model(_group())

    def run(module: nn.Module, tokens: int) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        x = torch.arange(tokens * 12.0).reshape(2, tokens, 6).sin().requires_grad_()
        y = module(x, torch.arange(tokens * 2).reshape(2, tokens))
        y.backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

    eager = {tokens: run(model, tokens) for tokens in (3, 5)}
    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for tokens in eager if dynamic else (3,):
            torch.testing.assert_close(run(compiled, tokens), eager[tokens])
    scripted = torch.jit.script(model)
    for _ in range(3):
        torch.testing.assert_close(run(scripted, 3), eager[3])
    sizes = {1: torch.export.Dim("s", min=2)}
    inputs = torch.ones(2, 4, 6), torch.zeros(2, 4, dtype=torch.int64)
    program = torch.export.export(model, inputs, dynamic_shapes=(sizes, sizes))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("weft.vocab_parallel_cross_entropy.default") == 1
    assert targets.count("weft.vocab_parallel_linear_cross_entropy.default") == 1
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))
    with autocast(torch.bfloat16):
        loss = model(*inputs)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, model(*inputs), rtol=0.02, atol=0.02)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")
@pytest.mark.parametrize("operator", ["aten::addmm.dtype_out", "aten::mm.dtype"])
def test_torch_has_products_with_float32_sums_on_cuda(operator: str) -> None:
    """These kernels sum the gradient of a half-precision weight over chunks of tokens. The check needs no GPU."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")

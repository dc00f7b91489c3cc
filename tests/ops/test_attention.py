"""ParallelAttention against unsharded attention: values, gradients, steps, communication, errors, tracing."""

from __future__ import annotations

import io
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.operators import autocast, chunk
from support.ranks import on_ranks

# The largest error, relative to the largest magnitude in a tensor or 1. The reference computes in float64 from the same
# rounded values. Sums cancel, above all in the gradient of k's bias, which is 0 without rotary embeddings. In bfloat16,
# projections, attention and steps each round to 8 bits.
TOLERANCE = {"float64": 1e-12, "float32": 5e-5, "bfloat16": 6e-2}
REDUCE, GATHER, SCATTER = ({name: 1} for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"))
DIM, HEADS, HEAD_DIM, TOKENS, RATE = 10, 12, 4, 7, 0.05


def _group() -> str:
    return dist.group.WORLD.group_name


def _kv_counts(world_size: int) -> list[int]:
    """Return numbers of key/value heads that are sharded, replicated on some ranks, and replicated on all."""
    return [kv for kv in (12, 4, 3, 2, 1) if kv % world_size == 0 or world_size % kv == 0]


def _random(dtype: str, *shape: int) -> Tensor:
    """Return random values that the dtype represents, as float64."""
    return torch.randn(shape).to(getattr(torch, dtype)).double()


def _weights(dtype: str, kv: int, bias: bool) -> dict[str, Tensor]:
    rows = {"q": HEADS * HEAD_DIM, "k": kv * HEAD_DIM, "v": kv * HEAD_DIM}
    weights = {f"{name}.weight": _random(dtype, size, DIM) * 0.3 for name, size in rows.items()}
    weights["out.weight"] = _random(dtype, DIM, HEADS * HEAD_DIM) * 0.15
    if bias:
        weights |= {f"{name}.bias": _random(dtype, size) for name, size in (*rows.items(), ("out", DIM))}
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    a, b = x[..., :half], x[..., half:]
    c, d = cos.unsqueeze(-3), sin.unsqueeze(-3)
    return torch.cat([a * c[..., :half] - b * d[..., :half], b * c[..., half:] + a * d[..., half:]], -1)


def _reference(
    x: Tensor,
    w: dict[str, Tensor],
    kv: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return unsharded attention, from matrix products and a softmax."""

    def heads(name: str, count: int) -> Tensor:
        rows = F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
        return rows.unflatten(-1, (count, HEAD_DIM)).transpose(-3, -2)

    q, k, v = heads("q", HEADS), heads("k", kv), heads("v", kv)
    if cos is not None:
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    k, v = k.repeat_interleave(HEADS // kv, -3), v.repeat_interleave(HEADS // kv, -3)
    scores = q @ k.transpose(-1, -2) / HEAD_DIM**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return F.linear((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2), w["out.weight"], w.get("out.bias"))


def _shards(w: dict[str, Tensor], kv: int, fused: bool, world_size: int, rank: int) -> dict[str, Tensor]:
    """Return this rank's shard of every tensor, by the names of the module's parameters."""
    shards = {"out.weight": w["out.weight"].chunk(world_size, 1)[rank]}
    if "out.bias" in w:
        shards["out.bias"] = w["out.bias"]
    num_local, num_kv_local = HEADS // world_size * HEAD_DIM, max(kv // world_size, 1) * HEAD_DIM
    for kind in ("weight", "bias"):
        if f"q.{kind}" in w:
            full = torch.cat([w[f"{name}.{kind}"] for name in "qkv"])
            rows = weft.nn.shard_qkv(full, HEADS, kv, world_size, rank)
            projections = zip("qkv", rows.split([num_local, num_kv_local, num_kv_local]), strict=True)
            shards |= (
                {f"qkv.{kind}": rows} if fused else {f"{name}.{kind}": projection for name, projection in projections}
            )
    return shards


def _module(w: dict[str, Tensor], kv: int, fused: bool, dtype: str, **options: Any) -> nn.Module:
    kv_group = weft.nn.kv_groups(kv, _group())
    module = weft.nn.ParallelAttention(
        *(DIM, HEADS, kv),
        group_name=_group(),
        kv_group_name=kv_group,
        head_dim=HEAD_DIM,
        fused_qkv=fused,
        bias="q.bias" in w,
        dtype=getattr(torch, dtype),
        **options,
    )
    shards = _shards({name: t.detach() for name, t in w.items()}, kv, fused, dist.get_world_size(), dist.get_rank())
    module.load_state_dict(shards)
    return module


def _assert_close(actual: Tensor, expected: Tensor, dtype: str, label: str) -> None:
    assert actual.shape == expected.shape, label
    bound = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= bound, f"{label}: {error:.2e} > {bound:.2e}"


def _compare(
    rank: int, world_size: int, dtype: str, kv: int, fused: bool, bias: bool, shape: tuple[int, ...], **options: Any
) -> None:
    """Take two SGD steps with a block and its reference; compare results of each, and the parameters at the end."""
    forward = {name: options.pop(name) for name in ("cos", "sin", "mask") if name in options}
    causal, sequence_dim = options.get("causal", False), options.get("sequence_dim")
    w = _weights(dtype, kv, bias)
    module = _module(w, kv, fused, dtype, **options)
    if sequence_dim is not None:
        forward["sequence_size"] = shape[sequence_dim]
    label = f"{kv} kv heads, fused {fused}, bias {bias}, {options}"

    def local_shard(tensor: Tensor) -> Tensor:
        tensor = tensor.to(getattr(torch, dtype))
        full = tensor.detach().clone().requires_grad_()
        return full if sequence_dim is None else chunk(tensor, sequence_dim, world_size, rank)

    for step in range(2):
        x, grad = _random(dtype, *shape).requires_grad_(), _random(dtype, *shape)
        y = _reference(x, w, kv, *(forward.get(name) for name in ("cos", "sin", "mask")), causal=causal)
        gradients = torch.autograd.grad(y, [x, *w.values()], grad)
        local_x = local_shard(x)
        out = module(local_x, **forward)
        out.backward(local_shard(grad).detach())
        _assert_close(out, local_shard(y), dtype, f"y, {label}, step {step}")
        _assert_close(local_x.grad, local_shard(gradients[0]), dtype, f"grad x, {label}, step {step}")
        full = dict(zip(w, gradients[1:], strict=True))
        for name, expected in _shards(full, kv, fused, world_size, rank).items():
            _assert_close(module.get_parameter(name).grad, expected, dtype, f"grad {name}, {label}, step {step}")
        w = {name: (t - RATE * full[name]).detach().requires_grad_() for name, t in w.items()}
        torch.optim.SGD(module.parameters(), RATE).step()
        module.zero_grad()
    for name, expected in _shards(w, kv, fused, world_size, rank).items():
        _assert_close(module.get_parameter(name), expected, dtype, f"{name}, {label}")
    _assert_replicas_equal(module)


def _assert_replicas_equal(module: nn.Module) -> None:
    if not module.kv_group_name:
        return
    group = dist.distributed_c10d._resolve_process_group(module.kv_group_name)
    for name, parameter in module.named_parameters():
        rows = 2 * HEAD_DIM if name.startswith("qkv.") else HEAD_DIM if name[:2] in ("k.", "v.") else 0
        if rows:
            replicas = [torch.empty_like(parameter[-rows:]) for _ in range(group.size())]
            dist.all_gather(replicas, parameter[-rows:].detach().contiguous(), group=group)
            assert all(torch.equal(replica, replicas[0]) for replica in replicas), name


@on_ranks(1, 2, 3, 4)
def test_sharded_and_replicated_kv_heads_match_reference(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    for kv, fused in product(_kv_counts(world_size), (True, False)):
        _compare(rank, world_size, "float64", kv, fused, fused, (2, TOKENS, DIM), causal=fused)


@on_ranks(1, 2, 3, 4)
def test_sequence_shards_match_reference(rank: int, world_size: int) -> None:
    """Shards of the sequence: even, uneven, empty on some ranks, empty on all."""
    torch.manual_seed(2)
    shapes = {True: [((2, TOKENS, DIM), 1), ((2, 0, DIM), 1)], False: [((12, DIM), 0), ((2, 1, DIM), -2)]}
    for kv, fused in product(_kv_counts(world_size), (True, False)):
        for shape, dim in shapes[fused]:
            _compare(rank, world_size, "float64", kv, fused, not fused, shape, causal=not fused, sequence_dim=dim)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_and_bfloat16_match_reference(rank: int, world_size: int, dtype: str) -> None:
    torch.manual_seed(3)
    angles = torch.rand(TOKENS, HEAD_DIM // 2).repeat(1, 2)
    for kv, sequence_dim in product((12, 2), (None, 1)):
        options = {"causal": True, "sequence_dim": sequence_dim, "cos": angles.cos(), "sin": angles.sin()}
        _compare(rank, world_size, dtype, kv, kv == 2, True, (2, TOKENS, DIM), **options)


@on_ranks(2)
def test_masks_and_rotary_match_reference(rank: int, world_size: int) -> None:
    torch.manual_seed(4)
    angles = torch.rand(2, TOKENS, HEAD_DIM // 2).double().repeat(1, 1, 2)
    rotary = {"cos": angles.cos(), "sin": angles.sin()}
    shared = {name: tensor[0] for name, tensor in rotary.items()}
    padding = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
    padding[1, :, :, -2:] = False
    added = torch.randn(TOKENS, TOKENS)  # float32: cast to the dtype of x
    banded = torch.ones(2, 1, TOKENS, TOKENS).double().tril(2).log()
    forms = [rotary, shared, {"mask": padding}, {"mask": added}, {"mask": banded, **rotary}]
    for kv, form, causal in product((4, 1), forms, (False, True)):
        options = form | {"causal": causal, "sequence_dim": 1 if causal else None}
        _compare(rank, world_size, "float64", kv, True, False, (2, TOKENS, DIM), **options)


@on_ranks(2)
def test_gradients_of_masks_and_rotary_match_reference(rank: int, world_size: int) -> None:
    """Each rank computes the gradients of its own heads; the ranks' gradients are summed."""
    torch.manual_seed(5)
    w = _weights("float64", 4, bias=False)
    leaves = [torch.randn(TOKENS, size).double().requires_grad_() for size in (HEAD_DIM, HEAD_DIM, TOKENS)]
    x = _random("float64", 2, TOKENS, DIM)
    y = _reference(x, w, 4, *leaves)
    expected = torch.autograd.grad(y.square().sum(), leaves)
    module = _module(w, 4, True, "float64")
    for run in (module, torch.jit.script(module)):
        for _ in range(3):
            gradients = torch.autograd.grad(run(x, *leaves).square().sum(), leaves)
            torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)


@on_ranks(4)
def test_number_of_collectives(rank: int) -> None:
    for kv, fused, bias in [(4, False, True), (2, True, True), (2, False, False)]:
        options = {"group_name": _group(), "kv_group_name": weft.nn.kv_groups(kv, _group()), "bias": bias}
        x = torch.randn(2, 3, 8, requires_grad=True)
        # The gradients of replicated k and v: one all-reduce for their weights, one for their biases.
        num_further = 0 if kv == 4 else 2 if bias else 1
        block = weft.nn.ParallelAttention(8, 4, kv, fused_qkv=fused, **options)
        y = collectives_of(lambda block=block, x=x: block(x), expected=REDUCE)
        collectives_of(y.sum().backward, expected={"all_reduce": 1 + num_further})
        collectives_of(
            lambda block=block, x=x: block(x.detach()).sum().backward(), expected={"all_reduce": 1 + num_further}
        )
        block = weft.nn.ParallelAttention(8, 4, kv, fused_qkv=fused, sequence_dim=1, **options)
        y = collectives_of(lambda block=block, x=x: block(x), expected=GATHER | SCATTER)
        summed = {"all_reduce": num_further} if num_further else {}
        collectives_of(y.sum().backward, expected={"all_gather_into_tensor": 2} | SCATTER | summed)


@on_ranks(4)
def test_invalid_head_counts_raise(rank: int) -> None:
    cases: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
        ((8, 6), {}, "got num_heads 6 on 4 ranks; num_heads must be a multiple of the number"),
        ((8, 4, 3), {}, "got num_heads 4 with num_kv_heads 3; num_heads must be a multiple"),
        ((8, 4, 0), {}, "got num_heads 4 with num_kv_heads 0; .* at least 1"),
        ((8, 12, 6), {}, "got num_kv_heads 6 on 4 ranks; one must be a multiple of the other"),
        ((10, 4), {}, "got dim 10, which is not a multiple of num_heads 4; pass head_dim"),
        ((8, 4, 2), {}, "got num_kv_heads 2 on 4 ranks without the group of the 2 ranks that hold the same head"),
        ((8, 4, 2), {"kv_group_name": _group()}, "without the group of the 2 ranks that hold the same head"),
        ((8, 4, 4), {"kv_group_name": _group()}, "got kv_group_name, but the 4 key/value heads are sharded over 4"),
    ]
    for args, options, text in cases:
        with pytest.raises(ValueError, match="^ParallelAttention: .*" + text):
            weft.nn.ParallelAttention(*args, group_name=_group(), **options)


def test_invalid_inputs_raise() -> None:
    options: dict[str, Any] = {"group_name": ""}
    block = weft.nn.ParallelAttention(8, 2, **options)
    sequence_parallel = weft.nn.ParallelAttention(8, 2, sequence_dim=0, **options)
    x, cos = torch.ones(2, 3, 8), torch.ones(3, 4)
    for module, args, text in [
        (block, (x[0, 0],), "got x with 1 dims"),
        (block, (x, cos), "got one of cos and sin"),
        (block, (x, cos[:, :2], cos), "got cos or sin of 2 features for heads of 4"),
        (block, (x, None, None, torch.ones(2, 2, 3, 3)), "got a mask for 2 heads"),
        (block, (x, None, None, torch.ones(3, 3, dtype=torch.int64)), "got a mask of integers"),
        (block, (x, None, None, None, 3), "got sequence_size without sequence_dim"),
        (sequence_parallel, (x,), "got sequence_dim 0 for x with 3 dims"),
    ]:
        with pytest.raises(ValueError, match="^ParallelAttention: .*" + text):
            module(*args)


@on_ranks(4)
def test_only_replicated_heads_start_equal(rank: int) -> None:
    """Replicated heads have equal values, other heads different ones; all within nn.Linear's bounds."""
    torch.manual_seed(rank)
    for fused in (True, False):
        kv_group = weft.nn.kv_groups(2, _group())
        options = {"group_name": _group(), "head_dim": HEAD_DIM, "bias": True, "fused_qkv": fused}
        block = weft.nn.ParallelAttention(DIM, HEADS, 2, kv_group_name=kv_group, **options)
        _assert_replicas_equal(block)
        queries = (block.qkv if fused else block.q).weight[:HEAD_DIM].detach()
        gathered = [torch.empty_like(queries) for _ in range(4)]
        dist.all_gather(gathered, queries.contiguous())
        assert not torch.equal(gathered[0], gathered[1])
        for name, parameter in block.named_parameters():
            bound = (HEADS * HEAD_DIM if name.startswith("out.") else DIM) ** -0.5
            assert parameter.abs().max() <= bound and (name == "out.bias") == (not parameter.any()), name


def _run(module: nn.Module, x: Tensor, **forward: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x, **forward)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def _blocks() -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Return blocks and their extra forward arguments; on 4 ranks, key/value heads are replicated on some ranks."""
    torch.manual_seed(0)
    blocks = []
    for kv, fused, sequence_dim in [(2, False, 1)] if dist.get_world_size() == 4 else [(4, False, None), (1, True, 1)]:
        w = _weights("float32", kv, bias=fused)
        module = _module(w, kv, fused, "float32", causal=True, sequence_dim=sequence_dim)
        blocks.append((module, {} if fused else {"mask": torch.ones(1, 1, dtype=torch.bool)}))
    return blocks


@on_ranks(2, timeout=300)
def test_compiled_and_exported_blocks_match_eager(rank: int) -> None:
    for block, forward in _blocks():
        inputs = {tokens: torch.randn(2, tokens, DIM) for tokens in (3, 5)}
        eager = {tokens: _run(block, x, **forward) for tokens, x in inputs.items()}
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens, x in inputs.items():
            torch.testing.assert_close(_run(compiled, x, **forward), eager[tokens])
        # On CUDA, attention in torch 2.11 requires min(4 s, 12 s) = 4 s, which torch cannot prove for a named size s.
        size = torch.export.Dim("s", min=2) if inputs[3].is_cpu else torch.export.Dim.AUTO
        shapes = {"x": {1: size}, **dict.fromkeys(forward)}
        program = torch.export.export(block, (torch.randn(2, 4, DIM),), forward, dynamic_shapes=shapes)
        targets = [str(node.target) for node in program.graph.nodes]
        column = "column_linear" if block.sequence_dim is None else "all_gather_linear"
        assert targets.count(f"weft.{column}.default") == 1
        torch.testing.assert_close(program.module()(inputs[5], **forward), eager[5][0])


def test_compiles_while_a_default_device_is_set() -> None:
    block = weft.nn.ParallelAttention(DIM, HEADS, head_dim=HEAD_DIM, group_name="")
    x = torch.randn(2, 3, DIM)
    torch._dynamo.reset()
    with torch.device("cpu"):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(_run(compiled, x), _run(block, x))


@on_ranks(2, 4)
def test_scripted_block_loads_and_rebinds(rank: int) -> None:
    new_group = dist.new_group().group_name
    for block, forward in _blocks():
        x = torch.randn(2, 3, DIM)
        eager = _run(block, x, **forward)
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(block), buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
        kv_group = weft.nn.kv_groups(block.num_kv_heads, new_group)
        if kv_group not in ("", new_group):
            with pytest.raises(
                ValueError, match="rebind_group: got a module whose key/value heads are replicated on some"
            ):
                weft.nn.rebind_group(loaded, new_group)
            assert loaded.group_name == block.group_name
            assert weft.nn.rebind_group(loaded, new_group, kv_group) == 1
        else:
            assert weft.nn.rebind_group(loaded, new_group) == 1
        assert (loaded.group_name, loaded.kv_group_name) == (new_group, kv_group)
        for _ in range(3):  # the profiling executor specializes after two runs
            torch.testing.assert_close(_run(loaded, x, **forward), eager)


@on_ranks(1, 2)
def test_autocast_computes_in_bfloat16(rank: int) -> None:
    angles = torch.rand(5, HEAD_DIM // 2).repeat(1, 2)
    for block, _ in _blocks():
        x = torch.randn(2, 5, DIM)
        forward = {"cos": angles.cos(), "sin": angles.sin(), "mask": torch.randn(5, 5), "sequence_size": None}
        if block.sequence_dim is not None:
            x, forward["sequence_size"] = chunk(x, 1, dist.get_world_size(), rank, requires_grad=False), 5
        exact = block(x, **forward)
        with autocast(torch.bfloat16):
            y = block(x, **forward)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
        y.float().sum().backward()
        assert all(p.grad.dtype is torch.float32 for p in block.parameters())

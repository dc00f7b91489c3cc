"""Chunked sequence-parallel operators: results, communication, memory, and equal choices on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from ops.overlapping import overlapping
from support.ranks import on_ranks

GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"
# On 2 ranks a chunk has 128 rows of each rank's shard in float32 (2 MiB in all), or 64 in float64.
FEATURES = 2048


def _group() -> str:
    return dist.group.WORLD.group_name


def _device() -> str:
    return torch.get_default_device().type


def _shard(full: Tensor, rank: int, num_ranks: int) -> Tensor:
    shards = full.chunk(num_ranks)
    return (shards[rank] if rank < len(shards) else full[:0]).clone()


def _column(x: Tensor, weight: Tensor, size: int) -> Tensor:
    return weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=_group(), dim_size=size)


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_many_chunks_match_unchunked(rank: int, world_size: int, dtype: str) -> None:
    """Several chunks give the unchunked result, also if the shards are uneven and the last chunk is shorter."""
    torch_dtype = getattr(torch, dtype)
    bound = 1e-13 if dtype == "float64" else 8e-3
    torch.manual_seed(0)
    for num_rows in (301 * world_size - 2, 260 * world_size):
        x = (torch.randn(num_rows, FEATURES) / 45).to(torch_dtype)
        up, down = (torch.randn(6, FEATURES)).to(torch_dtype), (torch.randn(FEATURES, 5)).to(torch_dtype)
        row, grads = torch.randn(num_rows, 5).to(torch_dtype), torch.randn(num_rows, FEATURES).to(torch_dtype)
        results = {}
        for mode in ("never", "always"):
            with overlapping(mode):
                column = [_shard(x, rank, world_size).requires_grad_(), up.clone().requires_grad_()]
                y = _column(*column, num_rows)
                y.backward(torch.ones_like(y))
                scattered = [row.clone().requires_grad_(), down.clone().requires_grad_()]
                z = weft.ops.linear_reduce_scatter(*scattered, scatter_dim=0, group_name=_group())
                z.backward(_shard(grads, rank, world_size))
                results[mode] = [y, z, *(leaf.grad for leaf in (*column, *scattered))]
        for unchunked, chunked in zip(results["never"], results["always"], strict=True):
            torch.testing.assert_close(chunked, unchunked, rtol=bound, atol=bound * unchunked.abs().max().item())


# (sizes before the sequence, sizes after it): a rank's rows of a chunk are contiguous, or not. In the last layout
# a long shard has four chunks or more; in the others it has two.
LAYOUTS = {
    "tokens": ((), (5,)),
    "sequence first": ((), (2, 5)),
    "one sequence": ((1,), (5,)),
    "batch first": ((2,), (5,)),
    "many chunks": ((), (64, 1024)),
}


def _results(op: Callable[..., Tensor], values: list[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """Return the output, and the gradients of the arguments whose indices are `wanted`."""
    leaves = [value.clone().requires_grad_(i in wanted) for i, value in enumerate(values)]
    y = op(*leaves)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).sin().view(y.shape))
    return [y.detach(), *(leaves[i].grad for i in wanted)]


@on_ranks(2, 3)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_lengths_and_layouts_match_unchunked(rank: int, world_size: int, layout: str) -> None:
    """Sequences of any length, also with uneven or empty shards, give the unchunked result."""
    before, after = LAYOUTS[layout]
    dim, features, group = len(before), after[-1], _group()

    def column(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return weft.ops.all_gather_linear(x, weight, bias, gather_dim=dim, group_name=group, dim_size=num_rows)

    def row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return weft.ops.linear_reduce_scatter(x, weight, bias, scatter_dim=dim, group_name=group)

    def mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None = None, *biases: Tensor) -> Tensor:
        options = {"group_name": group, "sequence_dim": dim, "sequence_size": num_rows}
        return weft.ops.column_row_mlp(x, w1, w2, w3, *biases, activation="silu", **options)

    up, gate, down = (torch.randn(size, dtype=torch.float64) for size in ((3, features), (3, features), (features, 3)))
    b1, b2, b3 = (torch.randn(size, dtype=torch.float64) for size in (3, features, 3))
    for num_rows in (1, world_size, world_size + 1, 4 * world_size, 5 * world_size - 1, 7 * world_size - 2):
        full = torch.randn(*before, num_rows, *after, dtype=torch.float64)
        shards = full.chunk(world_size, dim)
        x = shards[rank] if rank < len(shards) else full.narrow(dim, 0, 0)
        calls = {
            "column": (column, [x, up], [(0, 1), (0,), (1,)]),
            "column with bias": (column, [x, up, b1], [(0, 1, 2)]),
            "row": (row, [full[..., :3], down], [(0, 1), (0,), (1,)]),
            "row with bias": (row, [full[..., :3].contiguous(), down, b2], [(0, 1, 2)]),
            "mlp": (mlp, [x, up, down], [(), (0, 1, 2)]),
            "gated mlp": (mlp, [x, up, down, gate, b1, b2, b3], [(), range(7)]),
        }
        for name, (op, values, choices) in calls.items():
            for wanted in choices:
                results = {}
                for mode in ("never", "always"):
                    with overlapping(mode), torch.set_grad_enabled(len(wanted) > 0):
                        results[mode] = _results(op, values, wanted) if wanted else [op(*values)]
                for i, (chunked, unchunked) in enumerate(zip(results["always"], results["never"], strict=True)):
                    where = f"{name}, {num_rows} rows, gradients of {wanted}: result {i}"
                    torch.testing.assert_close(chunked, unchunked, rtol=1e-12, atol=1e-11, msg=where)


@on_ranks(2)
def test_half_types_are_summed_in_float32(rank: int) -> None:
    """A weight's gradient, summed over 16 blocks of rows, has the error of two roundings, not of one per block."""
    torch.manual_seed(0)
    x = torch.rand(4096, FEATURES).bfloat16()
    weight = torch.zeros(6, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    with overlapping("always"):
        y = _column(_shard(x, rank, 2), weight, 4096)
        y.backward(torch.ones_like(y))
    expected = x.double().sum(0).expand(6, -1)
    assert ((weight.grad - expected) / expected).abs().max() <= 2**-7


@on_ranks(2)
def test_collectives_and_bytes(rank: int) -> None:
    """At most two chunks of a gathered or scattered tensor exist at a time."""
    x, weight = torch.randn(512, FEATURES), torch.randn(8, FEATURES)
    back = torch.randn(FEATURES, 8)
    chunk_bytes = 2 << 20
    with overlapping("always"), torch.no_grad():
        collectives_of(lambda: _column(x, weight, 1024), expected={GATHERS: 4})
        with counted() as count:
            y = _column(x, weight, 1024)
            assert count.peak() - count.now("communication") == y.nbytes + 2 * chunk_bytes

        def row() -> Tensor:
            return weft.ops.linear_reduce_scatter(y, back, scatter_dim=0, group_name=_group())

        collectives_of(row, expected={SCATTERS: 4})
        with counted() as count:
            z = row()
            assert count.peak() - count.now("communication") == z.nbytes + 2 * chunk_bytes

        def mlp() -> Tensor:
            return weft.ops.column_row_mlp(x, weight, back, activation="silu", group_name=_group(), sequence_dim=0)

        collectives_of(mlp, expected={GATHERS: 4, SCATTERS: 4})
        with counted() as count:
            z = mlp()
            hidden = (
                128 * 8 * 4
            )  # bytes of a rank's hidden values of one chunk, of which there are two: before and after the activation
            assert count.peak() - count.now("communication") == z.nbytes + 4 * chunk_bytes + 2 * hidden


@on_ranks(2, 3)
def test_ranks_agree_on_measured_choice(rank: int, world_size: int) -> None:
    """Results are also correct while measuring, and if the shards of the weight have different sizes."""
    num_rows = 512 * world_size
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, FEATURES), torch.randn(9 - rank, FEATURES)
    shard = _shard(x, rank, world_size)
    expected = x @ weight.t()
    with overlapping("auto"):
        for _ in range(34):
            torch.testing.assert_close(_column(shard, weight, num_rows), expected, rtol=1e-4, atol=1e-3)
        assert weft.overlap.table() == []
        torch.testing.assert_close(_column(shard, weight, num_rows), expected, rtol=1e-4, atol=1e-3)
        (choice,) = weft.overlap.table()
        choices = [None] * world_size
        dist.all_gather_object(choices, choice)
        assert choices == [choice] * world_size
        assert choice.op == "weft::all_gather_linear"
        assert (choice.dtype, choice.device, choice.num_ranks) == ("float32", _device(), world_size)
        assert (choice.num_rows, choice.row_bytes) == (512 * (2 if world_size == 2 else 4), FEATURES * 4)
        assert choice.ratio > 0
        assert choice.in_pieces == (choice.ratio <= 0.95)
        num_chunks = 4 if world_size == 2 else 7  # of 128 and 85 rows
        collectives_of(
            lambda: _column(shard, weight, num_rows), expected={GATHERS: num_chunks if choice.in_pieces else 1}
        )


@on_ranks(2)
def test_alternating_layers_are_all_timed(rank: int) -> None:
    """While layers of several sizes alternate, calls are timed until each size has samples, but at most 512 calls."""
    x = torch.randn(512, FEATURES)
    for num_weights in (3, 12):
        weights = [torch.randn(2 + i, FEATURES) for i in range(num_weights)]
        with overlapping("auto"), torch.no_grad():
            num_calls = 0
            while not weft.overlap.table():
                _column(x, weights[num_calls % num_weights], 1024)
                num_calls += 1
                assert num_calls < 515
            assert num_calls > 34
            (choice,) = weft.overlap.table()
            assert choice.ratio > 0


@on_ranks(2)
def test_different_modes_raise(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft").group_name
    x, weight = torch.randn(512, FEATURES), torch.randn(3, FEATURES)
    where = ""
    if rank == 0:
        where = r"all-gather of a chunk \(WEFT_OVERLAP and WEFT_OVERLAP_TABLE must be equal on all ranks\)"
    with overlapping("always" if rank == 0 else "never"), pytest.raises(weft.CollectiveMismatchError, match=where):
        weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=group)


@on_ranks(2)
def test_some_calls_are_not_measured(rank: int) -> None:
    """Small shapes are not measured, nor are deterministic algorithms, whose results must not depend on timing."""
    small, weight = torch.randn(8, 16), torch.randn(4, 16)
    x, wide = torch.randn(512, FEATURES), torch.randn(4, FEATURES)
    with overlapping("auto"):
        for _ in range(40):
            _column(small, weight, 16)
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(40):
                collectives_of(lambda: _column(x, wide, 1024), expected={GATHERS: 1})
        finally:
            torch.use_deterministic_algorithms(False)
        assert weft.overlap.table() == []


@on_ranks(4)
def test_groups_measure_separately(rank: int) -> None:
    """Each group measures separately, and a rank in two groups of equal size uses each group's choice."""
    mesh = dist.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={0: "cpu:weft", 1: "cpu:weft"}
    )
    x, weight = torch.randn(256, FEATURES), torch.randn(3, FEATURES)
    with overlapping("auto"):
        for name in ("a", "b"):
            group = mesh[name].get_group()
            for _ in range(35):
                weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=group.group_name)
        for name in ("a", "b", "a"):
            group = mesh[name].get_group()
            y = weft.ops.all_gather_linear(x, weight, gather_dim=0, group_name=group.group_name)
            inputs = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(inputs, x, group=group)
            torch.testing.assert_close(y, torch.cat(inputs) @ weight.t(), rtol=1e-4, atol=1e-3)


@on_ranks(2)
def test_loaded_table_is_used(rank: int, tmp_path: Path) -> None:
    x, weight = torch.randn(512, FEATURES), torch.randn(4, FEATURES)
    choice = weft.overlap.Choice("weft::all_gather_linear", "float32", _device(), 2, 1024, FEATURES * 4, True)
    with overlapping("auto"):
        for in_pieces, expected in ((True, 4), (False, 1)):
            path = tmp_path / f"{rank}.json"
            path.write_text(json.dumps([asdict(choice) | {"in_pieces": in_pieces}]))
            weft.overlap.load(path)
            collectives_of(lambda: _column(x, weight, 1024), expected={GATHERS: expected})
            weft.overlap.save(path)
            before = weft.overlap.table()
            assert [each.in_pieces for each in before] == [in_pieces]
            weft.overlap.load(path)
            assert weft.overlap.table() == before


def test_invalid_modes_and_tables_raise(tmp_path: Path) -> None:
    for mode in ("sometimes", None):
        with pytest.raises(ValueError, match=rf"got the overlap mode {mode!r}; pass auto, always or never"):
            weft.overlap.set_mode(mode)
    path = tmp_path / "table.json"
    for text in (b"{", b"[1]", b'[{"op": "x"}]', b"{}", b"\xff\xfe"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"which is not an overlap table; pass a file that weft\.overlap\.save"):
            weft.overlap.load(path)
    entry = asdict(weft.overlap.Choice("weft::column_row_mlp", "float32", "cpu", 2, 1024, 64, True))
    invalid = {
        "op": "weft::nope",
        "dtype": "torch.float32",
        "device": "tpu",
        "num_ranks": "2",
        "num_rows": 1000,
        "row_bytes": 2**70,
        "in_pieces": 1,
        "ratio": float("inf"),
    }
    for name, value in invalid.items():
        path.write_text(json.dumps([entry | {name: value}]))
        with pytest.raises(ValueError, match=rf"{name} is {value!r}\)"):
            weft.overlap.load(path)
    path.write_text(json.dumps([entry, entry | {"in_pieces": False}]))
    with pytest.raises(ValueError, match="more than one choice for"):
        weft.overlap.load(path)
    with pytest.warns(UserWarning, match="has nothing to save"):
        weft.overlap.save(path)


def test_environment_sets_mode_and_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("[]")
    missing = str(tmp_path / "missing.json")
    for value, table, expected in (
        ("never", str(path), "never"),
        ("often", str(path), "got WEFT_OVERLAP=often; set it to auto, always or never"),
        ("auto", missing, f"got WEFT_OVERLAP_TABLE={missing}, which cannot be read (No such file or directory)"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", "import weft; print(weft.overlap.mode())"],
            env=os.environ | {"WEFT_OVERLAP": value, "WEFT_OVERLAP_TABLE": table},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert expected in ran.stdout + ran.stderr
        assert (ran.returncode == 0) == (value == "never")

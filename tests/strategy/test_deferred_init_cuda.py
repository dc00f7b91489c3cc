"""Deferred initialization on a CUDA device gives the values of eager initialization, and its memory is bounded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.on_device import on_device
from torch import Tensor, nn

from strategy import test_deferred_init
from support import cuda_runtime
from support.processes import run_process
from weft.strategy import deferred_init
from weft.strategy.deferred import full_value_of, is_deferred, shard_of, stream

DEVICE = torch.device("cuda", 0)
ROUNDING = 2 << 20  # bytes: the caching allocator leaves up to 1 MiB of a block unused; two allocations

test_values = on_device("cuda", test_deferred_init.test_values_are_bitwise_equal, num_ranks=1)
test_every_shard = on_device("cuda", test_deferred_init.test_every_shard_of_random_stream_is_bitwise_equal, num_ranks=1)


def _peak_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the function's result, and the bytes that it allocated at most at a time."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return result, torch.cuda.max_memory_allocated() - before


def _chunk_bytes(dtype: torch.dtype) -> int:
    return (stream.unit_of(DEVICE) + 64) * dtype.itemsize + ROUNDING


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "args", "dtype"),
    [
        ("uniform_", (-1, 2), torch.float32),
        ("normal_", (1, 2), torch.float64),
        ("normal_", (0, 0.02), torch.bfloat16),
        ("bernoulli_", (0.3,), torch.float32),
        ("exponential_", (), torch.float16),
        ("random_", (-3, 90), torch.int64),
    ],
)
def test_chunks_have_the_values_of_one_call(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    columns = stream.unit_of(DEVICE) - 5  # chunks end inside of rows

    def build() -> Tensor:
        return getattr(torch.empty(3, columns, dtype=dtype, device=DEVICE), name)(*args)

    torch.cuda.manual_seed(3)
    expected, numbers_after = build(), torch.rand(5, device=DEVICE)
    torch.cuda.manual_seed(3)
    with deferred_init():
        tensor, peak = _peak_of(build)
    assert peak <= _chunk_bytes(dtype)
    assert torch.equal(torch.rand(5, device=DEVICE), numbers_after)
    for dim, start, length in ((0, 1, 1), (1, columns // 3, columns // 2)):
        (shard, streamed), peak = _peak_of(lambda d=dim, s=start, n=length: shard_of(tensor, d, s, n))
        assert streamed
        assert torch.equal(shard, expected.narrow(dim, start, length)), dim
        assert peak <= shard.nbytes + _chunk_bytes(dtype)


@pytest.mark.cuda
def test_layers_are_never_full() -> None:
    columns = stream.unit_of(DEVICE) // 512

    def build() -> nn.Module:
        torch.cuda.manual_seed(3)
        return nn.ModuleList([nn.Linear(columns, 2048), nn.Embedding(1024, columns, padding_idx=700)])

    with DEVICE:
        expected = build()
        with deferred_init():
            model, peak = _peak_of(build)
    assert peak <= _chunk_bytes(torch.float32) + columns * 4  # and the bias of the layer, if that is not deferred
    for value, parameter in zip(expected.parameters(), model.parameters(), strict=True):
        if is_deferred(parameter):
            rows = parameter.shape[0] // 4
            (shard, streamed), peak = _peak_of(lambda p=parameter, n=rows: shard_of(p, 0, 2 * n, n))
            assert streamed and torch.equal(shard, value[2 * rows : 3 * rows])
            assert peak <= shard.nbytes + _chunk_bytes(torch.float32) < value.nbytes


@pytest.mark.cuda
def test_call_that_torch_splits_is_materialized_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_CUDA_BYTES", 1 << 23)

    def build() -> Tensor:
        torch.cuda.manual_seed(3)
        return torch.empty(4096, 1024, device=DEVICE).normal_()

    expected = build()
    with deferred_init():
        tensor = build()
    (shard, streamed), peak = _peak_of(lambda: shard_of(tensor, 0, 1024, 1024))
    assert not streamed and torch.equal(shard, expected[1024:2048])
    assert peak <= expected.nbytes + shard.nbytes + ROUNDING
    assert torch.equal(full_value_of(tensor), expected)


@pytest.mark.cuda
def test_values_of_other_calls_are_full_one_at_a_time() -> None:
    """No more than an operator's input and result exist at a time."""
    with deferred_init():
        tensor = ((torch.randn(1024, 2048, device=DEVICE) * 0.3) + 1).exp()
    full = tensor.numel() * tensor.element_size()
    (shard, streamed), peak = _peak_of(lambda: shard_of(tensor, 0, 0, 256))
    assert not streamed
    assert torch.equal(shard, full_value_of(tensor)[:256])
    assert peak <= 2 * full + ROUNDING


@pytest.mark.cuda
def test_view_of_random_values_is_drawn_in_chunks() -> None:
    columns = 2 * stream.unit_of(DEVICE) // 512
    with deferred_init():
        view = torch.randn(2048, columns, device=DEVICE)[512:1536].t()
    rows = columns // 4
    (shard, streamed), peak = _peak_of(lambda: shard_of(view, 0, rows, rows))
    assert streamed
    assert torch.equal(shard, full_value_of(view)[rows : 2 * rows])
    drawn = 2048 * rows * 4  # the rows of the view are columns, of which all rows are drawn
    assert peak <= drawn + shard.nbytes + _chunk_bytes(torch.float32) < 2048 * columns * 4


@pytest.mark.cuda
def test_another_geometry_of_the_kernel_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_known_results", {})
    call = (torch.ops.aten.normal_.default, torch.float32, (), DEVICE)
    unit = stream.unit_of(DEVICE)
    assert stream.draws_in_chunks(*call)
    stream._known_results.clear()
    monkeypatch.setattr(stream, "unit_of", lambda device: unit // 2)
    assert not stream.draws_in_chunks(*call)


# torch's own host code launches the kernels, which are skipped: values are zero, and generators advance as on a GPU.
STATES = """
import json
import torch
import weft
from weft.strategy.deferred import stream

device, results = torch.device("cuda", 0), {}
aten = torch.ops.aten
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for function, args in ((aten.uniform_.default, (-1, 1)), (aten.normal_.default, (0, 1)),
                           (aten.bernoulli_.float, (0.3,)), (aten.exponential_.default, ()),
                           (aten.cauchy_.default, ()), (aten.log_normal_.default, ()),
                           (aten.geometric_.default, (0.4,)), (aten.random_.default, ())):
        size = stream.unit_of(device)
        states = [stream._drawn(function, dtype, args, device, sizes)[1] for sizes in ((size + 1,), (size, 1))]
        results[f"{function} {dtype}"] = [int.from_bytes(state[8:], "little") for state in states]
print(json.dumps(results))
"""


@pytest.mark.cuda_runtime
def test_generator_advances_by_turns_of_a_grid() -> None:
    environment = {"OMP_NUM_THREADS": "1", **cuda_runtime.environment(skip_kernels=True)}
    result = run_process([sys.executable, "-c", STATES], env=environment, timeout=100)
    assert result.returncode == 0, result.stderr
    offsets = json.loads(result.stdout.splitlines()[-1])
    assert len(offsets) == 4 * 8
    for call, (in_one_call, in_chunks) in offsets.items():
        turns = (2 if "float64" in call else 1) + 1  # one for the last element
        assert in_one_call == in_chunks == 4 * turns, call

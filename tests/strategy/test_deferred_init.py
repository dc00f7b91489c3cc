"""Deferred initialization: each shard is bitwise equal to that of the same program without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ops.memory.counting import counted
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import weft
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.deferred import full_value_of, is_deferred, materialize, shard_of, stream
from weft.strategy.deferred.tensor import generator_of


class _Ordered(nn.Module):
    """Built in another order than `modules()` lists; initialized by hand, by `apply`, and by operators."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(24, 40)
        self.embedding = nn.Embedding(50, 24, padding_idx=3)
        self.norm = nn.LayerNorm(24)
        self.head = head
        self.scale = nn.Parameter(torch.randn(4, 24) * 0.3)
        self.qkv = nn.Parameter(torch.empty(72, 24))
        for third in self.qkv.chunk(3):
            nn.init.xavier_uniform_(third)
        self.register_buffer("table", torch.outer(torch.arange(30.0), torch.arange(20.0)), persistent=False)
        self.plain = torch.arange(100.0) * 2
        self.listed = [torch.ones(40), {"deep": torch.zeros(3, 9) + 1}]
        self.listed.append(self.listed)
        self.conv = nn.Conv1d(3, 8, 5)
        self.apply(self._initialize)
        with torch.no_grad():
            self.conv.weight.copy_(torch.randn(8, 3, 5)).div_(2)
            self.head.weight[:7].mul_(3)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()


class _DependsOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 30)
        if self.first.weight.sum() > -1e9:
            self.first.weight.data.clamp_(min=0)
        largest = self.first.weight.max().item()
        self.second = nn.Linear(30, 5)
        nn.init.constant_(self.second.weight, largest)


def _by_hand() -> nn.Module:
    module = nn.Linear(33, 47)
    nn.init.trunc_normal_(module.weight, std=0.5, a=-0.6, b=0.6)
    nn.init.orthogonal_(module.weight[:20])
    return module


def _from_one_to_another() -> nn.Module:
    """Return a layer whose bias is written from its weight; under one size limit only the weight is deferred."""
    module = nn.Linear(20, 30)
    module.bias.data.copy_(module.weight[:, 0])
    torch.add(module.weight.data[:, 1], module.bias.data, out=module.bias.data)
    return module


def _to_bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Embedding(7, 9)).to(torch.bfloat16)


def _tied() -> nn.Module:
    embedding, head = nn.Embedding(31, 12), nn.Linear(12, 31, bias=False)
    head.weight = embedding.weight
    head.weight.data.normal_(std=0.1)
    return nn.ModuleDict({"embedding": embedding, "head": head})


def _random_in_between() -> nn.Module:
    first = nn.Linear(20, 30)
    small = torch.rand(3, device="cpu")  # small, and therefore drawn at once, from the layer's stream
    second = nn.Linear(30, int(20 + 10 * small[0].item()))
    unused = torch.randn(500)
    del unused
    return nn.Sequential(first, second, copy.deepcopy(first))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ordered": _Ordered,
    "depends on values": _DependsOnValues,
    "by hand": _by_hand,
    "bfloat16": _to_bfloat16,
    "from one to another": _from_one_to_another,
    "tied": _tied,
    "random in between": _random_in_between,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2),
    "lstm": lambda: nn.LSTM(9, 11, num_layers=2),
}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@on_ranks(1)
@pytest.mark.parametrize("min_bytes", [0, 600])
@pytest.mark.parametrize("name", MODELS)
def test_values_are_bitwise_equal(rank: int, name: str, min_bytes: int) -> None:
    torch.manual_seed(11)
    expected = MODELS[name]()
    numbers_after = torch.rand(5)
    torch.manual_seed(11)
    with deferred_init(min_bytes):
        model = MODELS[name]()
    assert torch.equal(torch.rand(5), numbers_after)
    deferred = [tensor for tensor in _tensors(model).values() if is_deferred(tensor)]
    assert deferred
    materialize(model)
    assert _tensors(model).keys() == _tensors(expected).keys()
    for key, value in _tensors(expected).items():
        assert torch.equal(_tensors(model)[key], value), key
        assert isinstance(_tensors(model)[key], nn.Parameter) == isinstance(value, nn.Parameter)
        assert _tensors(model)[key].requires_grad == value.requires_grad
    if name == "ordered":
        assert torch.equal(model.plain, expected.plain)
        assert torch.equal(model.listed[1]["deep"], expected.listed[1]["deep"])
    if name == "tied":
        assert model["head"].weight is model["embedding"].weight


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (17,), (5, 7), (300, 1001), (3, 5, 7, 9), (2, 70_001), (70_001, 2)])
def test_every_shard_of_random_stream_is_bitwise_equal(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """normal_ draws 16 numbers at once, so chunks end at multiples of 16; the sizes lie below and above such ends."""

    def build() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype).normal_(1, 2)
        uniform = torch.empty(shape, dtype=dtype).uniform_(-1, 1)
        tensor.mul_(0.5).add_(1)
        tensor[:1].zero_()
        return tensor if shape[0] % 2 else uniform

    torch.manual_seed(3)
    expected = build()
    torch.manual_seed(3)
    with deferred_init(0):
        tensor = build()
    for dim, size in enumerate(shape):
        for start, length in ((0, size), (size // 3, size - size // 3), (size // 2, size // 4)):
            shard, streamed = shard_of(tensor, dim, start, length)
            assert streamed
            assert torch.equal(shard, expected.narrow(dim, start, length)), (dim, start, length)
    assert torch.equal(full_value_of(tensor), expected)


@on_ranks(1)
def test_peak_excludes_full_parameters(rank: int) -> None:
    torch.manual_seed(3)
    with counted() as count:
        with deferred_init():
            layers = [nn.Linear(1000, 2000), nn.Embedding(3000, 500, padding_idx=1), nn.LayerNorm(100_000)]
        assert count.peak() < 600_000  # a chunk, and states of the generator
        weft.memory.reset_peak()
        before = count.now()
        for layer in layers:
            for parameter in filter(is_deferred, layer.parameters()):
                size = parameter.shape[0]
                shard, streamed = shard_of(parameter, 0, size // 2, size // 4)
                assert streamed and shard.shape[0] == size // 4
                assert count.peak() - before <= shard.nbytes + 600_000
                del shard
                weft.memory.reset_peak()


@on_ranks(1)
def test_peak_of_replayed_calls(rank: int) -> None:
    """No more than an operator's input and result exist at a time, and no copy is made of a view."""
    with counted() as count:
        with deferred_init():
            computed = ((torch.randn(500, 1000) * 0.3) + 1).exp()
            view = torch.randn(1500, 1000).as_strided((500, 1000), (1000, 1))
        for tensor, largest in ((computed, 2 * 2_000_000), (view, 6_000_000)):
            weft.memory.reset_peak()
            before = count.now()
            shard, streamed = shard_of(tensor, 0, 100, 50)
            assert not streamed and shard.shape[0] == 50
            assert count.peak() - before <= largest + shard.nbytes + 100_000
            del shard


@on_ranks(1)
def test_peak_of_views(rank: int) -> None:
    """A shard of a view is drawn in chunks, and so is a part of a shard."""
    torch.manual_seed(3)
    expected = torch.randn(1500, 1000)[500:, 7:].t()
    torch.manual_seed(3)
    with counted() as count:
        with deferred_init():
            view = torch.randn(1500, 1000)[500:, 7:].t()
            part = view.narrow(0, 100, 300).clone(memory_format=torch.contiguous_format).narrow(1, 10, 900)
        for tensor, value in ((view, expected), (part, expected[100:400, 10:910])):
            for dim in range(2):
                weft.memory.reset_peak()
                before = count.now()
                shard, streamed = shard_of(tensor, dim, 100, 50)
                assert streamed and torch.equal(shard, value.narrow(dim, 100, 50))
                # Rows or columns of the full tensor are drawn, of which the shard is a part.
                assert count.peak() - before <= 1500 * 50 * 4 + shard.nbytes + 600_000
                del shard


@on_ranks(2, 3)
@pytest.mark.parametrize("plan", ["auto", {"mlp.0": "column", "mlp.2": "row", "words": "vocab_embedding"}])
def test_parallelize_materializes_shards(rank: int, world_size: int, plan: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(301, 64)
            self.mlp = nn.Sequential(nn.Linear(64, 207), nn.ReLU(), nn.Linear(207, 64))
            self.norm = nn.LayerNorm(64)
            self.register_buffer("offset", torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.mlp(self.words(x))) @ self.offset

    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(4)
    expected = weft.parallelize(Model(), mesh, plan)
    torch.manual_seed(4)
    with deferred_init(0):
        model = Model()
    weft.parallelize(model, mesh, plan)
    for (name, got), value in zip(_tensors(model).items(), _tensors(expected).values(), strict=True):
        assert type(got) is type(value), name
        if isinstance(value, DTensor):
            assert got.placements == value.placements
            got, value = got.to_local(), value.to_local()  # noqa: PLW2901
        assert torch.equal(got, value), name
    x = torch.arange(24).view(2, 12)
    assert torch.equal(model(x), expected(x))


@on_ranks(2)
def test_layers_distributed_by_torch_are_materialized(rank: int, world_size: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))

    def build() -> nn.Module:
        torch.manual_seed(6)
        model = nn.ModuleDict({"ours": nn.Linear(40, 60), "stock": nn.Linear(40, 60)})
        parallelize_module(model["stock"], mesh, ColwiseParallel())
        return model

    expected = build()
    with deferred_init(0):
        model = build()
    for module in (expected, model):
        weft.parallelize(module, mesh, {"ours": "row"})
    for (name, got), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert not is_deferred(got.to_local()), name
        assert torch.equal(got.full_tensor(), value.full_tensor()), name
    x = torch.ones(3, 40)
    assert torch.equal(model["stock"](x), expected["stock"](x))


@on_ranks(2)
def test_report_lists_temporarily_full_parameters(world_size: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    with deferred_init(0):
        model = nn.ModuleDict({name: nn.Linear(40, 60) for name in ("drawn", "cut_off", "turned")})
        nn.init.trunc_normal_(model["cut_off"].weight)
        nn.init.orthogonal_(model["turned"].weight)
    weft.parallelize(model, mesh, weft.strategy.Plan({"*": "column"}, verify="never"))
    assert weft.strategy.report(model).notes == (
        "full on every rank until they were sharded, as their values cannot be drawn in chunks: cut_off.weight, "
        "turned.weight",
    )


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("uniform_", (-1, 2)),
        ("normal_", (1, 2)),
        ("bernoulli_", (0.3,)),
        ("exponential_", (2.0,)),
        ("cauchy_", ()),
        ("log_normal_", ()),
        ("geometric_", (0.4,)),
        ("random_", ()),
        ("random_", (7,)),
        ("random_", (-3, 90)),
    ],
)
def test_random_streams_of_many_chunks_are_bitwise_equal(
    rank: int, name: str, args: tuple[Any, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    expected = getattr(torch.empty(700, 301, dtype=dtype), name)(*args)
    after = torch.rand(5)
    torch.manual_seed(5)
    with deferred_init():
        tensor = getattr(torch.empty(700, 301, dtype=dtype), name)(*args)
    assert torch.equal(torch.rand(5), after)
    assert torch.equal(shard_of(tensor, 0, 333, 200)[0], expected[333:533])
    assert torch.equal(full_value_of(tensor), expected)


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_other_shards_are_passed_over(rank: int, dtype: torch.dtype) -> None:
    """The generator is advanced past chunks that a rank does not need, instead of drawing them."""
    num_drawn = 0
    own = stream._draw_chunks

    def draw_chunks(*args: Any, **kwargs: Any) -> Iterator[tuple[int, Tensor]]:
        nonlocal num_drawn
        for first, values in own(*args, **kwargs):
            num_drawn += values.numel()
            yield first, values

    chunk, rows, columns = stream._CHUNK, 2048, 1000
    with pytest.MonkeyPatch.context() as patch, deferred_init():
        patch.setattr(stream, "_draw_chunks", draw_chunks)
        for name in ("uniform_", "normal_"):
            num_drawn = 0
            tensor = getattr(torch.empty(rows, columns, dtype=dtype), name)()
            assert 16 <= num_drawn <= chunk + 16, "the last chunk"
            num_drawn = 0
            shard_of(tensor, 0, rows // 2, rows // 8)
            assert rows * columns // 8 <= num_drawn <= rows * columns // 8 + 2 * chunk


@on_ranks(1)
def test_normal_number_left_in_the_generator_is_used(rank: int) -> None:
    """It is the second of two; `log_normal_` takes it, so that no chunk begins with a new one."""
    rows, columns = 70, 4096
    for call in (lambda: None, lambda: torch.randn(3, dtype=torch.float64)):
        torch.manual_seed(5)
        call()
        expected = torch.empty(rows, columns).log_normal_()
        torch.manual_seed(5)
        call()
        with deferred_init():
            tensor = torch.empty(rows, columns).log_normal_()
        start = stream._CHUNK // columns
        assert torch.equal(shard_of(tensor, 0, start, 8)[0], expected[start : start + 8])


def test_kernel_that_reseeds_is_not_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(tensor: Tensor, generator: torch.Generator) -> Tensor:
        seed = torch.randint(1 << 30, (), generator=generator).item()
        return tensor.uniform_(generator=torch.Generator().manual_seed(int(seed)))

    uniform = torch.ops.aten.uniform_.default
    monkeypatch.setattr(stream, "_RANDOM", {uniform, seeded})
    cpu = torch.device("cpu")
    assert stream.draws_in_chunks(uniform, torch.float32, (), cpu)
    assert not stream.draws_in_chunks(seeded, torch.float32, (), cpu)


@on_ranks(1)
def test_unchunked_stream_is_materialized_in_full(rank: int) -> None:
    torch.manual_seed(5)
    expected = torch.empty(700, 301).bernoulli_(0.3)
    after = torch.rand(5)
    torch.manual_seed(5)
    key = (torch.ops.aten.bernoulli_.float, torch.float32, (0.3,), torch.device("cpu"))
    before = stream.draws_in_chunks(*key)
    stream._known_results[key] = False
    try:
        with deferred_init():
            tensor = torch.empty(700, 301).bernoulli_(0.3)
        assert torch.equal(torch.rand(5), after)
        shard, streamed = shard_of(tensor, 0, 333, 200)
    finally:
        stream._known_results[key] = before
    assert not streamed and torch.equal(shard, expected[333:533])


@on_ranks(1)
def test_random_stream_through_view_dtype_is_bitwise_equal(rank: int) -> None:
    torch.manual_seed(5)
    expected = torch.empty(8192, dtype=torch.int32)
    expected.view(torch.float32).normal_()
    torch.manual_seed(5)
    with deferred_init():
        tensor = torch.empty(8192, dtype=torch.int32)
        tensor.view(torch.float32).normal_()
    assert torch.equal(shard_of(tensor, 0, 100, 4000)[0], expected[100:4100])


@on_ranks(1)
@pytest.mark.parametrize("min_bytes", [0, 16 * 1024])
def test_unwritten_and_changed_tensors_raise(rank: int, min_bytes: int) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    with deferred_init(min_bytes):
        model = nn.ModuleDict({"layer": nn.Linear(5, 7)})
        model.extra = nn.Parameter(torch.empty(3))
        model.other = nn.Parameter(model.layer.weight.new_empty(2, 2))
        model.later = nn.Parameter(torch.empty(2))
    values = model.later.data
    if min_bytes > 0:
        values.numpy()[:] = 1  # after the model was built, bypassing torch
    else:
        values.fill_(1)
    with pytest.raises(ValueError, match=r"nothing was written to 'extra', 'other' while the model was built"):
        weft.parallelize(model, mesh, {"layer": "column"})

    source = torch.ones(7, 5)
    with deferred_init(0):
        layer = nn.Linear(5, 7)
        layer.weight.data.copy_(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match=r"read a tensor of shape \(7, 5\) that has been changed since"):
        full_value_of(layer.weight)


def test_cuda_without_an_index_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has no generators before it is initialized; torch.cuda.current_device() initializes it."""

    def current_device() -> int:
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        return 1

    generators = tuple(torch.Generator().manual_seed(seed) for seed in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    assert generator_of(torch.device("cuda")) is generators[1]
    assert generator_of(torch.device("cuda:2")) is generators[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_is_that_of_the_construction(dtype: torch.dtype) -> None:
    """Transformers builds a model in the dtype of its config by setting torch's default dtype for a while."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            module = nn.Linear(128, 128)
            module.register_buffer("ramp", torch.arange(0.0, 20_000.0))
            module.register_buffer("ones", torch.full((64, 64), 1.0))
            module.register_buffer("draws", torch.randn(64, 64))
            return module
        finally:
            torch.set_default_dtype(torch.float32)

    expected = build()
    with deferred_init(min_bytes=1024):
        module = build()
    materialize(module)
    for mine, theirs in zip(module.state_dict().values(), expected.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)

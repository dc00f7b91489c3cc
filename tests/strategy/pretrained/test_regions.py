"""A region of a deferred tensor has the values of the full tensor, and reads only its own elements from files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.strategy import deferred_init
from weft.strategy.deferred import full_value_of, is_deferred, shard_of
from weft.strategy.deferred.files import FileTensor
from weft.strategy.deferred.regions import region_of

Tensors = dict[str, Tensor]


def _padded_shard(tensors: Tensors) -> Tensor:
    """Return the second of three shards as FSDP2 makes it."""
    shard = tensors["a"].chunk(3)[1]
    padded = shard.new_zeros(3, 10)
    padded.narrow(0, 0, shard.shape[0]).copy_(shard)
    return padded.view(-1).view(3, 10)


def _overwritten(tensors: Tensors) -> Tensor:
    result = torch.randn(8, 10)
    result.copy_(tensors["a"])
    result[2:5].mul_(2)
    result[:, 4:].copy_(tensors["b"][:, 4:])
    return result


def _read_before_a_write(tensors: Tensors) -> Tensor:
    copy = tensors["a"].clone()
    before = copy.to(torch.float64)
    copy.zero_()
    return before


def _read_before_its_values_were_read(tensors: Tensors) -> Tensor:
    source = tensors["a"]
    copy = source.clone()
    assert source[0, 0].item() != 0
    source.mul_(2)
    return copy


def _through_another_kind_of_view(tensors: Tensors) -> Tensor:
    result = torch.zeros(8, 10)
    view = result.as_strided((10, 8), (1, 10))
    result.copy_(tensors["b"])
    view[2:4].copy_(tensors["a"].t()[2:4])
    return result


def _diagonal(tensors: Tensors) -> Tensor:
    result = torch.zeros(8, 10)
    result.copy_(tensors["b"])
    result.diagonal().fill_(7)
    return result


def _in_parts(tensors: Tensors) -> Tensor:
    result = torch.full((8, 10), 3.0)
    for index, row in enumerate(tensors["a"][:6]):
        result[index].copy_(row)  # a write by select has no rule: the full tensor is materialized
    return result


# (how a tensor is made of 8 x 10 tensors "a" and "b" of a file; whether each region reads only its own elements)
CASES: dict[str, tuple[Callable[[Tensors], Tensor], bool]] = {
    "itself": (lambda t: t["a"], True),
    "another dtype": (lambda t: t["a"].to(torch.float64).bfloat16(), True),
    "transposed": (lambda t: t["a"].t().contiguous(), True),
    "view of a transposed tensor": (lambda t: t["a"].t(), True),
    "permuted": (lambda t: t["a"].view(2, 4, 10).permute(2, 0, 1), False),
    "concatenated rows": (lambda t: torch.cat([t["a"], t["b"]]), True),
    "concatenated columns": (lambda t: torch.cat([t["a"], t["b"]], dim=-1), True),
    "stacked": (lambda t: torch.stack([t["a"], t["b"]], 1), True),
    "part of a split": (lambda t: t["a"].split([3, 5])[1], True),
    "slice": (lambda t: t["a"][-5:, 2:9], True),
    "every second row": (lambda t: t["a"][::2], False),
    "row": (lambda t: t["a"][3], True),
    "unbound row": (lambda t: t["a"].unbind()[-2], True),
    "column": (lambda t: t["a"].select(1, -3), True),
    "with a dim of one": (lambda t: t["a"].unsqueeze(1), True),
    "heads": (lambda t: t["a"].view(4, 2, 10), False),  # a part of a head's rows is no region of the full tensor
    "one of two heads": (lambda t: t["a"].view(2, 4, 10)[1], False),
    "flat": (lambda t: t["a"].view(-1), False),
    "other dims": (lambda t: t["a"].view(1, 4, 1, 20).view(2, 2, 5, 2, 2), False),
    "elementwise in place": (lambda t: t["a"].clone().mul_(3).add_(1), True),
    "functions without a rule": (lambda t: t["a"].exp() + t["b"], False),
    "padded shard": (_padded_shard, False),
    "overwritten": (_overwritten, True),
    "read before a write": (_read_before_a_write, True),
    "written in parts": (_in_parts, False),
    "read before its values were read": (_read_before_its_values_were_read, True),
    "written through another kind of view": (_through_another_kind_of_view, False),
    "diagonal": (_diagonal, False),
    "squeezed": (lambda t: torch.cat([t["a"][:1], t["b"][:1]], dim=1).squeeze(), False),
    "as another dtype": (lambda t: t["a"].clone().view(torch.int32), False),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(8, 10, generator=generator) for name in ("a", "b")}
    save_file(values, tmp_path / "tensors.safetensors")
    return tmp_path / "tensors.safetensors"


def _regions(shape: torch.Size) -> Iterator[tuple[tuple[int, int], ...]]:
    parts = [sorted({(0, size), (0, (size + 1) // 2), (size // 3, size), (size, size)}) for size in shape]
    return itertools.product(*parts)


@pytest.mark.parametrize("name", CASES)
def test_regions_have_the_values_of_the_full_tensor(file: Path, name: str) -> None:
    make, reads_own_elements = CASES[name]
    torch.manual_seed(3)
    expected = make(load_file(file))
    torch.manual_seed(3)
    with deferred_init(min_bytes=0):
        tensor = make(load_file(file))
    assert is_deferred(tensor) and tensor.dtype == expected.dtype
    before = FileTensor.num_bytes_read
    num_found = 0
    for region in _regions(tensor.shape):
        values = region_of(tensor.tape, tensor.meta, tensor.device, region)
        if values is not None:
            num_found += 1
            assert torch.equal(values, expected[tuple(slice(*part) for part in region)]), region
            assert values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes
            num_bytes = FileTensor.num_bytes_read - before
            assert not reads_own_elements or num_bytes <= values.numel() * 4 * (2 if name == "overwritten" else 1)
        else:
            assert not reads_own_elements, region
        before = FileTensor.num_bytes_read
    assert num_found > 0 or not reads_own_elements
    assert torch.equal(full_value_of(tensor), expected)
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        shard, _ = shard_of(tensor, dim, size // 3, size - size // 3)
        assert torch.equal(shard, expected.narrow(dim, size // 3, size - size // 3))


def test_files_are_deferred_only_inside_the_context(file: Path) -> None:
    own = safe_open
    with deferred_init(min_bytes=0):
        from safetensors import safe_open as inside

        with inside(file, framework="pt") as opened:
            assert sorted(opened.keys()) == ["a", "b"] and opened.metadata() is None
            part = opened.get_slice("a")
            assert part.get_shape() == [8, 10] and part.get_dtype() == "F32"
            values = [opened.get_tensor("a"), part[:], part[2:4, 1:], *load_file(file).values()]
    assert all(is_deferred(each) for each in values)
    assert torch.equal(full_value_of(values[2]), load_file(file)["a"][2:4, 1:])
    import safetensors

    assert safetensors.safe_open is own
    assert not is_deferred(load_file(file)["a"])
    # A module that was imported inside the context keeps the replaced function, which then does the same as the own.
    with inside(file, framework="pt") as opened:
        assert type(opened.get_tensor("a")) is Tensor


def test_small_tensors_are_read_at_once(file: Path) -> None:
    with deferred_init(min_bytes=321):
        assert all(type(each) is Tensor for each in load_file(file).values())
    with deferred_init(min_bytes=320):
        assert all(is_deferred(each) for each in load_file(file).values())


def test_torch_load(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    saved = {"layers": [torch.randn(6, 4), torch.arange(3)], "step": 5}
    torch.save(saved, path)
    before = FileTensor.num_bytes_read
    with deferred_init(min_bytes=0):
        loaded = torch.load(path, weights_only=True)
    assert FileTensor.num_bytes_read == before and loaded["step"] == 5
    assert all(is_deferred(each) for each in loaded["layers"])
    shard, streamed = shard_of(loaded["layers"][0], 1, 1, 2)
    assert streamed and torch.equal(shard, saved["layers"][0][:, 1:3])
    assert FileTensor.num_bytes_read - before == 6 * 2 * 4
    assert torch.load(path, weights_only=True)["step"] == 5
    assert type(torch.load(path, weights_only=True)["layers"][0]) is Tensor


def test_torch_load_keeps_objects(tmp_path: Path) -> None:
    state = nn.InstanceNorm1d(300, affine=True).state_dict()
    state["small"] = torch.ones(2)
    torch.save({"state": state, "again": [state["weight"], state["weight"]]}, tmp_path / "weights.bin")
    with deferred_init(min_bytes=1000):
        loaded = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert loaded["state"]._metadata[""]["version"] == 2
    assert is_deferred(loaded["state"]["weight"]) and loaded["again"][0] is loaded["again"][1]
    assert loaded["state"]["small"].untyped_storage().nbytes() == 8  # a copy, not memory of the file


def test_nested_contexts(file: Path, tmp_path: Path) -> None:
    torch.save({"b": torch.randn(8, 10)}, tmp_path / "weights.bin")
    with deferred_init(min_bytes=0):
        with deferred_init(min_bytes=0):
            inner = load_file(file)["a"]
            target = torch.zeros(8, 10)
            target.copy_(torch.load(tmp_path / "weights.bin", weights_only=True)["b"])
        outer = load_file(file)["b"]
    assert is_deferred(inner) and is_deferred(outer) and inner.tape is not outer.tape
    assert torch.equal(full_value_of(target), torch.load(tmp_path / "weights.bin", weights_only=True)["b"])
    for name, tensor in (("a", inner), ("b", outer)):
        assert torch.equal(full_value_of(tensor), load_file(file)[name])


def test_a_view_reads_the_rows_around_its_region(file: Path) -> None:
    with deferred_init(min_bytes=0):
        tensor = load_file(file)["a"].view(-1).view(2, 2, 2, 10)
    before = FileTensor.num_bytes_read
    region_of(tensor.tape, tensor.meta, tensor.device, ((1, 2), (0, 1), (0, 2), (2, 3)))
    assert FileTensor.num_bytes_read - before == 4 * 10 * 4

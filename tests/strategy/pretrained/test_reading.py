"""`from_pretrained` inside `deferred_init`: each rank reads only its shards; the model equals that of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support import pretrained
from support.parity import full
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.deferred import is_deferred
from weft.strategy.deferred.files import FileTensor

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a directory for each family."""
    folder = tmp_path_factory.mktemp("pretrained")
    for family in pretrained.FAMILIES:
        pretrained.save(family, folder)
    return folder


def _mesh(data_size: int, tensor_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data_size, tensor_size), mesh_dim_names=("data_parallel", "tensor_parallel"))


def _loaded_and_sharded(path: Path, mesh: DeviceMesh, **options: Any) -> nn.Module:
    data_mesh = mesh["data_parallel"]
    with deferred_init(min_bytes=256):
        model = pretrained.load(path, **options)
    is_fully_sharded = data_mesh.size() > 1
    weft.parallelize(model, mesh, "auto", keeps_plain_on_one_rank=is_fully_sharded, keeps_deferred=is_fully_sharded)
    if is_fully_sharded:
        apply_fsdp(model, data_mesh)
    assert not any(is_deferred(tensor) for tensor in _local_tensors(model))
    return model


def _local_tensors(model: nn.Module) -> list[Tensor]:
    parameters = (p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters())
    return [*parameters, *model.buffers()]


def _assert_equal(model: nn.Module, reference: nn.Module, mesh: DeviceMesh) -> None:
    """Compare parameters bit for bit; then logits and gradients, with another part of the batch on each data rank.

    The reference computes the same parts one after the other, because Gemma's own code sums over a part in float32.
    """
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter.detach()), theirs[name]), name
    data_mesh = mesh["data_parallel"]
    rank, size = data_mesh.get_local_rank(), data_mesh.size()
    parts = pretrained.tokens().chunk(size)
    logits = model(input_ids=parts[rank]).logits
    pretrained.loss_of(logits, rank).backward()  # gradients are averaged over the data ranks
    for index, part in enumerate(parts):
        expected = reference(input_ids=part).logits
        (pretrained.loss_of(expected, index) / size).backward()
        if index == rank:
            assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    scale = max(p.grad.norm().item() for p in theirs.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        grad = theirs[name].grad
        if grad is not None:
            assert parameter.grad is not None, name
            difference = (full(parameter.grad) - grad).norm()
            assert difference <= TOLERANCE * max(grad.norm().item(), 1e-3 * scale), name


LAYOUTS = {2: {"tp2": (1, 2), "dp2": (2, 1)}, 4: {"dp2,tp2": (2, 2)}}


@on_ranks(2, 4, timeout=240)
@pytest.mark.parametrize("family", pretrained.FAMILIES)
def test_each_family_matches_one_device_and_is_saved(rank: int, world_size: int, folders: Path, family: str) -> None:
    for layout, sizes in LAYOUTS[world_size].items():
        mesh = _mesh(*sizes)
        model = _loaded_and_sharded(folders / family, mesh)
        _assert_equal(model, pretrained.load(folders / family), mesh)
        saved = folders / layout / family
        weft.save_pretrained(model, saved)
        if rank == 0:
            pretrained.assert_same_directories(saved, folders / family)


@on_ranks(2, 4)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ranks_read_only_their_shards(world_size: int, folders: Path, family: str) -> None:
    for sizes in LAYOUTS[world_size].values():
        before = FileTensor.num_bytes_read
        model = _loaded_and_sharded(folders / family, _mesh(*sizes))
        read = FileTensor.num_bytes_read - before
        held = sum(tensor.nbytes for tensor in _local_tensors(model))
        assert read <= held, (sizes, read, held)

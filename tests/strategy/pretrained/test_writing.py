"""`weft.save_pretrained` writes a directory that is complete or absent, from any sharding."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support import pretrained
from support.parity import tensor_parallel
from support.processes import run_on_forks
from support.ranks import on_ranks
from weft.strategy import deferred_init, durable, save_pretrained, tensor_files
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.pretrained import output, writing

PLAN = {"up": "column_gather_output", "tied": "column_gather_output", "down": "row_split_input"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(10, 15)
        self.down = nn.Linear(15, 10, dtype=torch.float64)
        self.tied = nn.Linear(10, 15, bias=False)
        self.tied.weight = self.up.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.ones(0, 3, dtype=torch.bool))
        self.register_buffer("halves", torch.randn(5).bfloat16().view(5, 1).t())
        self.register_buffer("cache", torch.ones(4), persistent=False)


def _expected() -> dict[str, Tensor]:
    state = Network().state_dict()
    del state["tied.weight"]
    return state


def _assert_stored(path: Path, expected: dict[str, Tensor]) -> None:
    stored = pretrained.stored(path)
    assert stored.keys() == expected.keys()
    for name, value in stored.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def test_one_process(tmp_path: Path) -> None:
    save_pretrained(Network(), tmp_path / "a" / "saved")
    assert os.listdir(tmp_path / "a" / "saved") == ["model.safetensors"]
    _assert_stored(tmp_path / "a" / "saved", _expected())
    save_pretrained(Network(), tmp_path / "halves", dtype=torch.bfloat16)
    converted = {name: v.bfloat16() if v.is_floating_point() else v for name, v in _expected().items()}
    _assert_stored(tmp_path / "halves", converted)


@on_ranks(2, 4)
@pytest.mark.parametrize("shares_files", [True, False])
def test_files_are_spread_over_ranks(rank: int, world_size: int, tmp_path: Path, shares_files: bool) -> None:
    opened: list[str] = []
    own = tensor_files.TensorFile.__init__

    def record(self: Any, path: Path, tensors: Any) -> None:
        opened.append(path.name)
        own(self, path, tensors)

    model = weft.parallelize(Network(), tensor_parallel(world_size), PLAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files.TensorFile, "__init__", record)
        if not shares_files:
            patch.setattr(writing, "_sees", lambda _: rank == 0)
        save_pretrained(model, tmp_path / "saved", max_shard_size=700)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert index["weight_map"].keys() == _expected().keys() and len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in _expected().values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "saved" / file)
    _assert_stored(tmp_path / "saved", _expected())
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, opened)
    if shares_files:
        assert everyone == [files[number::world_size] for number in range(world_size)]
    else:
        assert everyone == [files, *[[]] * (world_size - 1)]
    model = Network()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    weft.load_pretrained(model, tmp_path / "saved")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in _expected().items())


@on_ranks(2)
def test_tensors_are_sent_to_a_rank_that_lacks_them(rank: int, tmp_path: Path) -> None:
    """As with pipeline stages and ranks that do not see the files of rank 0."""
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(3 + rank, 2)})
    nn.init.constant_(model[f"stage{rank}"].weight, rank + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_sees", lambda _: rank == 0)
        save_pretrained(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for number in range(2):
        assert torch.equal(stored[f"stage{number}.weight"], torch.full((2, 3 + number), number + 1.0))


@on_ranks(2)
def test_failing_rank_is_named_on_all_ranks(rank: int, tmp_path: Path) -> None:
    def fail(self: Any, tensor: Tensor) -> None:
        raise OSError("No space left on device")

    model = weft.parallelize(Network(), tensor_parallel(2), PLAN)
    text = (
        "rank 1 failed to write .*saved' .*No space left on device.*; remove the cause, and save again: nothing incom"
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=text):
        if rank == 1:
            patch.setattr(tensor_files.TensorFile, "write", fail)
        save_pretrained(model, tmp_path / "saved", max_shard_size=700)
    dist.barrier()
    assert os.listdir(tmp_path) == []
    save_pretrained(model, tmp_path / "saved")
    with pytest.raises(FileExistsError, match="which exists; pass another directory, or remove it first"):
        save_pretrained(model, tmp_path / "saved")


def test_wrong_arguments_raise_errors(tmp_path: Path) -> None:
    for size in ("5 apples", "", -1, 0, True, "0GB", 2.5, None):
        with pytest.raises(ValueError, match=re.escape(f"got max_shard_size={size!r}; pass a positive size")):
            save_pretrained(Network(), tmp_path / "saved", max_shard_size=size)
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    with deferred_init(min_bytes=0):
        deferred = nn.Linear(2, 2)
    for model in (on_meta, deferred):
        with pytest.raises(ValueError, match="got 'weight' without values; call parallelize, or read weights"):
            save_pretrained(model, tmp_path / "saved")
    model = nn.Linear(2, 2).to(torch.complex128)
    with pytest.raises(ValueError, match=re.escape("got 'weight' of torch.complex128, which safetensors lacks")):
        save_pretrained(model, tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 kB": 1500, "2MiB": 2 << 20, "3b": 3, 17: 17, "1TB": 10**12}
    assert {text: output.size_of(text) for text in sizes} == sizes


def test_directory_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    own = output.OutputDirectory.commit

    def commit(self: output.OutputDirectory) -> None:
        self.path.mkdir()
        (self.path / "tokenizer.json").write_text("{}")
        own(self)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match=r"rank 0 failed .*not empty"),
    ):
        patch.setattr(output.OutputDirectory, "commit", commit)
        save_pretrained(Network(), tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"] and os.listdir(tmp_path / "saved") == ["tokenizer.json"]


def _save_and_die(rank: int, path: Path, victim: int, number: int, kills_all: bool) -> None:
    """Save; before its system call `number` the rank `victim` kills itself or all ranks."""
    calls = 0

    def count(_: str) -> None:
        nonlocal calls
        if calls == number and kills_all:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        elif calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    if rank == victim:
        durable.before_call = count
    save_pretrained(Network(), path, max_shard_size=700)


@pytest.mark.parametrize(
    ("num_ranks", "victim", "kills_all"), [(1, 0, True), (2, 0, True), (2, 1, True), (2, 0, False), (2, 1, False)]
)
def test_killed_writers_leave_a_complete_directory_or_none(
    tmp_path: Path, num_ranks: int, victim: int, kills_all: bool
) -> None:
    """A rank, or all at once, is killed before each of its system calls; a later writer removes what is left."""
    saved = tmp_path / "saved"
    number, num_complete = 0, 0
    while any(statuses := run_on_forks(num_ranks, _save_and_die, saved, victim, number, kills_all)):
        assert statuses[victim] == -signal.SIGKILL
        if saved.exists():
            _assert_stored(saved, _expected())
            num_complete += 1
            shutil.rmtree(saved)
        number += 1
    assert number > (20 if victim == 0 else 3) and (num_complete < number)
    assert (num_complete > 0) == (victim == 0)  # rank 0 alone renames
    _assert_stored(saved, _expected())
    assert os.listdir(tmp_path) == ["saved"]


@on_ranks(2)
@pytest.mark.parametrize("is_fully_sharded", [False, True])
def test_conversions_of_transformers_are_reverted(
    rank: int, world_size: int, tmp_path: Path, is_fully_sharded: bool
) -> None:
    """Mixtral's experts are one tensor in the model and many on disk; a module around it and its tokenizer are kept."""
    from transformers import AutoConfig, AutoModelForCausalLM

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.txt").write_text("words")

    if rank == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model("mixtral", **pretrained.FAMILIES["llama"], num_local_experts=3)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(tmp_path / "experts")
    dist.barrier()
    with deferred_init(min_bytes=0):
        model = nn.Module()
        model.network = AutoModelForCausalLM.from_pretrained(tmp_path / "experts", dtype=torch.float64)
        model.tokenizer = Tokenizer()
    with pytest.raises(ValueError, match=r"without values; call parallelize, or read weights into it"):
        save_pretrained(model, tmp_path / "saved")
    # Also tensors that a conversion makes of others.
    [listed] = writing._tensor_sets(model, None, model.network, None)
    assert all(value.has_no_values for value in listed.values.values())
    if is_fully_sharded:  # three experts on two ranks
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        weft.parallelize(model, mesh, {"*": "replicate"}, keeps_plain_on_one_rank=True, keeps_deferred=True)
        apply_fsdp(model.network, mesh["data_parallel"])
    else:
        plan = {"network.model.layers.*.self_attn.*_proj": "column_gather_output"}
        weft.parallelize(model, tensor_parallel(world_size), plan)
    gathered = []
    own = DTensor.full_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", lambda self: (gathered.append(self), own(self))[1])
        save_pretrained(model, tmp_path / "saved")
    num_sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert len(gathered) == num_sharded > 0  # an expert tensor is assembled once for all of its parts
    if rank == 0:
        assert any("experts.0.w1" in name for name in pretrained.stored(tmp_path / "saved"))
        pretrained.assert_same_directories(tmp_path / "saved", tmp_path / "experts")
        assert (tmp_path / "saved" / "tokenizer.txt").read_text() == "words"

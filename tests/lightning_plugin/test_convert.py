"""`weft convert` writes the model of a training checkpoint as `save_pretrained` writes the trained model itself."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from torch import Tensor
from torch.utils.data import DataLoader

import weft
from lightning_plugin import test_pretrained
from support import pretrained
from support.processes import run_process
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.pretrained import checkpoints


def train(rank: int, world_size: int, folder: Path, layout: str) -> None:
    """Train a Llama, save a checkpoint, and save the model."""
    set_torchrun_environment(rank, world_size)
    options = {**test_pretrained.STAGES, "num_micro_batches": 2} if layout == "pp2" else {}
    module = test_pretrained.FineTuned(folder / "llama")
    run = trainer(world_size, WeftModelParallelStrategy(plan="auto", layout=layout, **options), folder / "runs")
    run.fit(module, DataLoader(test_pretrained.batches(1, 0), batch_size=None))
    run.save_checkpoint(folder / f"{layout}.ckpt")
    weft.save_pretrained(module, folder / layout / "llama")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_directories_equal_those_of_save_pretrained(tmp_path: Path, layout: str) -> None:
    pretrained.build("llama", **test_pretrained.SIZES).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    run_on_ranks(2, train, folder=tmp_path, layout=layout)
    command = [sys.executable, "-m", "weft", "convert", tmp_path / f"{layout}.ckpt", tmp_path / "converted"]
    result = run_process([*command, "--base", tmp_path / "llama"], has_optional_packages=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "converted" / "tokenizer.json").read_text() == "{}"
    pretrained.assert_same_directories(tmp_path / "converted", tmp_path / layout / "llama")
    command[-1] = tmp_path / "tensors"
    result = run_process([*command, "--module", "network", "--dtype", "bf16"], warm_processes=1)
    assert result.returncode == 0, result.stderr
    expected = pretrained.stored(tmp_path / layout / "llama")
    tensors = pretrained.stored(tmp_path / "tensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in tensors.items())


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "bert"])  # tied weights; another prefix; buffers and tied biases
def test_files_are_converted(tmp_path: Path, family: str) -> None:
    path = pretrained.save(family, tmp_path)
    state = {f"model.{name}": tensor for name, tensor in pretrained.load(path).state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "file.ckpt")
    weft.strategy.convert(tmp_path / "file.ckpt", tmp_path / "converted", base=path)
    pretrained.assert_same_directories(tmp_path / "converted", path)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained.build("llama", **test_pretrained.SIZES).save_pretrained(tmp_path / "llama")
    run_on_ranks(2, train, folder=tmp_path, layout="tp2")
    own, read = checkpoints._read_shards, list[weakref.ref[Tensor]]()

    def read_shards(*args: Any) -> Tensor:
        assert sum(each() is not None for each in read) <= 1  # the one that was written last
        tensor = own(*args)
        read.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoints, "_read_shards", read_shards)
    weft.strategy.convert(tmp_path / "tp2.ckpt", tmp_path / "converted", max_shard_size="20KB")
    assert len(read) == len(pretrained.stored(tmp_path / "converted")) > 10
    assert len(list((tmp_path / "converted").glob("*.safetensors"))) > 5


def test_wrong_arguments_raise_errors(tmp_path: Path) -> None:
    path = pretrained.save("llama", tmp_path)
    state = {f"net.{name}": tensor for name, tensor in pretrained.load(path).state_dict().items()}
    del state["net.lm_head.weight"]
    torch.save({"state_dict": {**state, "net.scale": torch.ones(1)}}, tmp_path / "file.ckpt")
    torch.save({"state_dict": state, "settings": Path()}, tmp_path / "objects.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    convert, out = weft.strategy.convert, tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"got the checkpoint '.*nothing', which does not exist; pass its path"):
        convert(tmp_path / "nothing", out)
    with pytest.raises(ValueError, match=r"found no tensors under 'model' or 'state_dict' in '.*', which has no keys;"):
        convert(tmp_path / "list.ckpt", out)
    torch.save({"net": state, "model": "llama"}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"in '.*other.ckpt', which has 'net', 'model'; pass a checkpoint that a Tr"):
        convert(tmp_path / "other.ckpt", out)
    with pytest.raises(ValueError, match=r"torch.load\(weights_only=True, mmap=True\) does not read \(.*\); save it"):
        convert(tmp_path / "objects.ckpt", out)
    with pytest.raises(FileNotFoundError, match=r"has neither manifest.json nor .metadata; pass the directory of one"):
        convert(tmp_path, out)
    with pytest.raises(ValueError, match=r"it misses 'lm_head.weight', and has unexpected 'scale'; pass the module"):
        convert(tmp_path / "file.ckpt", out, base=path, module="net")
    full = pretrained.load(path).state_dict()
    two = {f"{module}.{name}": tensor for module in ("student", "teacher") for name, tensor in full.items()}
    torch.save({"state_dict": two}, tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"several modules that fit `base`: 'student', 'teacher'; pass one of them"):
        convert(tmp_path / "two.ckpt", out, base=path)
    torch.save({"state_dict": {**full, "model.norm.weight": torch.ones(3)}}, tmp_path / "shapes.ckpt")
    with pytest.raises(ValueError, match=r"has other shapes: 'model.norm.weight \[3\] in place of \[32\]'; pass the"):
        convert(tmp_path / "shapes.ckpt", out, base=path)
    torch.save({"state_dict": {"model.q_proj.base_layer.weight": torch.ones(3)}}, tmp_path / "adapted.ckpt")
    with pytest.raises(ValueError, match=r"has adapters \('model.q_proj.base_layer.weight'\); load it in a training"):
        convert(tmp_path / "adapted.ckpt", out)
    with pytest.raises(ValueError, match=r"got module='nets', but '.*file.ckpt' has tensors such as 'net.model.embed"):
        convert(tmp_path / "file.ckpt", out, module="nets")
    with pytest.raises(FileNotFoundError, match=r"finds no config.json in '.*'; pass a pretrained directory"):
        convert(tmp_path / "file.ckpt", out, base=tmp_path)
    with pytest.raises(FileExistsError, match=r"got '.*llama', which exists; pass another directory"):
        convert(tmp_path / "file.ckpt", path)
    assert not out.exists()
    result = run_process([sys.executable, "-m", "weft", "convert", tmp_path / "nothing", out], warm_processes=1)
    assert result.returncode == 2
    assert result.stderr.startswith("weft convert: got the checkpoint") and "Traceback" not in result.stderr

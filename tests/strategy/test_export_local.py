"""export_local: plain local copies that can be scripted, and errors for scripting modules with DTensors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weft
from support.models import Conv1D, EncoderClassifier, FeedForward, Gpt2, Gpt2Mlp, Llama, LlamaArgs, token_batches
from support.parity import tensor_parallel
from support.ranks import on_ranks

TOKENS = token_batches(1, 37)[0][0]
MODELS = {
    "llama": lambda: Llama(LlamaArgs()),
    "tied": lambda: Llama(LlamaArgs(tie_head=True)),
    "gpt2": Gpt2,
    "gpt2 conv1d": lambda: Gpt2(linear=Conv1D),
    "encoder": EncoderClassifier,
}


@on_ranks(1, 2)
@pytest.mark.parametrize("case", list(MODELS))
def test_copy_is_plain_and_equal(world_size: int, case: str) -> None:
    model = weft.parallelize(MODELS[case](), tensor_parallel(world_size), "auto")
    local = weft.export_local(model)
    assert list(local.state_dict()) == list(model.state_dict())
    for (name, ours), theirs in zip(local.named_parameters(), model.parameters(), strict=True):
        assert type(ours) is nn.Parameter and not isinstance(ours, DTensor), name
        is_gathered = "self_attn" in name and case == "encoder"  # nn.MultiheadAttention reads its weights
        expected = theirs.full_tensor() if is_gathered else theirs.to_local()
        assert torch.equal(ours, expected) and ours.data_ptr() != theirs.to_local().data_ptr()
    assert type(local) is type(MODELS[case]())
    torch.testing.assert_close(local(TOKENS), model(TOKENS))
    assert isinstance(next(model.parameters()), DTensor)


SCRIPTED = {
    "swiglu": lambda: FeedForward(8, 12),
    "biases": lambda: FeedForward(8, 12, bias=True),
    "sequential": lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
    "conv1d": lambda: Gpt2Mlp(8, Conv1D, torch.float32, 0.0),
    "column and row": lambda: Gpt2Mlp(8, nn.Linear, torch.float32, 0.5).eval(),
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@on_ranks(2)
@pytest.mark.parametrize("case", list(SCRIPTED))
def test_copy_scripts_saves_and_loads(rank: int, world_size: int, case: str, folder: str) -> None:
    model = nn.Sequential(SCRIPTED[case](), nn.LayerNorm(8)).train(case != "column and row")
    mesh = tensor_parallel(world_size)
    weft.parallelize(model, mesh, {"0": "column_row_mlp"})
    x = torch.randn(3, 8)
    expected = model(x)
    scripted = torch.jit.script(weft.export_local(model))
    torch.testing.assert_close(scripted(x), expected)
    torch.jit.save(scripted, f"{folder}/{rank}.pt")
    loaded = torch.jit.load(f"{folder}/{rank}.pt")
    assert weft.nn.rebind_group(loaded, mesh.get_group().group_name) >= 1
    torch.testing.assert_close(loaded(x), expected)
    assert list(loaded.state_dict()) == list(model.state_dict())


@on_ranks(2)
def test_layers_of_a_copy_have_unsharded_features(world_size: int) -> None:
    model = nn.Sequential(Gpt2Mlp(8, Conv1D, torch.float32, 0.0))
    weft.parallelize(model, tensor_parallel(world_size), {"0.c_fc": "column", "0.c_proj": "row"})
    mlp = weft.export_local(model)[0]
    assert (mlp.c_fc.in_features, mlp.c_fc.out_features) == (8, 32)
    assert (mlp.c_proj.in_features, mlp.c_proj.out_features) == (32, 8)


@on_ranks(2)
def test_scripting_parallel_model_raises(world_size: int) -> None:
    model = weft.parallelize(FeedForward(8, 12), tensor_parallel(world_size), {"": "column_row_mlp"})
    for module in (model, nn.Sequential(nn.Identity(), model)):
        with pytest.raises(ValueError, match=r"call weft.export_local\(model\) and script its result"):
            torch.jit.script(module)
        with pytest.raises(ValueError, match=r"call weft.export_local\(model\)"):
            torch.jit.trace(module, torch.randn(3, 8))


@on_ranks(2)
def test_replicated_rnn_keeps_plain_weights(world_size: int) -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8), "mlp": FeedForward(8, 12)})
    reference = copy.deepcopy(model["rnn"])
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    x = torch.randn(3, 2, 8)
    local = weft.export_local(model)["rnn"]
    torch.testing.assert_close(local(x)[0], reference(x)[0])
    local.weight_hh_l0.data.zero_()
    assert not torch.equal(local(x)[0], reference(x)[0])


@on_ranks(2)
def test_sharded_and_meta_models_raise(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = weft.parallelize(nn.Sequential(FeedForward(8, 12)), mesh, {"0": "column_row_mlp"})
    fully_shard(model[0], mesh=mesh["data_parallel"])
    with pytest.raises(ValueError, match="'0' is sharded by fully_shard"):
        weft.export_local(model)
    with torch.device("meta"):
        model = FeedForward(8, 12)
    with pytest.raises(ValueError, match=r"'w1.weight' is on the meta device"):
        weft.export_local(weft.parallelize(model, mesh, {"": "column_row_mlp"}))

"""`weft.load_pretrained` fills a model with the weights of files, before or after it is sharded; ranks read shards."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support import pretrained
from support.parity import full, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import deferred_init, load_pretrained
from weft.strategy.data_parallel import apply_fsdp
from weft.strategy.deferred import is_deferred, materialize
from weft.strategy.deferred.files import FileTensor

PLAN = {"embedding": "vocab_embedding", "head": "vocab_head", "up": "column", "down": "row"}


class Network(nn.Module):
    """A model with a tied weight and a buffer, of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 10)
        self.up = nn.Linear(10, 15)
        self.down = nn.Linear(15, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 21, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        result: Tensor = self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))
        return result


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return values for all names of a Network, the tied weight once."""
    generator = torch.Generator().manual_seed(5)
    state = Network().state_dict()
    del state["head.weight"]
    return {name: torch.randn(value.shape, generator=generator).to(dtype) for name, value in state.items()}


def _assert_loaded(model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    ours: dict[str, Any] = {**dict(model.named_parameters()), "scale": model.get_buffer("scale")}
    assert ours.keys() == weights.keys()
    for name, value in ours.items():
        assert value.dtype == dtype
        assert torch.equal(full(value.detach()), weights[name].to(dtype)), name


def _mesh(data_size: int, tensor_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data_size, tensor_size), mesh_dim_names=("data_parallel", "tensor_parallel"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(_weights(), path)
    return path


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("is_deferred_model", [False, True])
def test_before_sharding(world_size: int, file: Path, is_deferred_model: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with deferred_init(min_bytes=0 if is_deferred_model else 1 << 30):
            model = Network().to(dtype)
        before = FileTensor.num_bytes_read
        report = load_pretrained(model, file)
        if is_deferred_model:
            assert FileTensor.num_bytes_read == before
            assert all(is_deferred(parameter) for parameter in model.parameters())
        weft.parallelize(model, tensor_parallel(world_size), PLAN)
        _assert_loaded(model, _weights(), dtype)
        assert model.head.weight is model.embedding.weight
        assert set(report.loaded) == _weights().keys()
        assert report.missing == report.unexpected == report.mismatched == ()
        if is_deferred_model:
            held = sum(p._local_tensor.numel() for p in model.parameters()) + 3
            assert FileTensor.num_bytes_read - before == held * 4


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_sharding(world_size: int, file: Path, dtype: str) -> None:
    sizes = {2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1)]}[world_size]
    for data_size, tensor_size in sizes:
        mesh = _mesh(data_size, tensor_size)
        model = weft.parallelize(Network().to(getattr(torch, dtype)), mesh, PLAN)
        if data_size > 1:
            apply_fsdp(model, mesh["data_parallel"])
        before = FileTensor.num_bytes_read
        load_pretrained(model, file)
        held = sum(p._local_tensor.numel() for p in model.parameters() if isinstance(p, DTensor)) + 3
        assert FileTensor.num_bytes_read - before == held * 4
        _assert_loaded(model, _weights(), getattr(torch, dtype))
        model(torch.arange(21))  # FSDP2 gathers what was loaded
        _assert_loaded(model, _weights(), getattr(torch, dtype))


def test_index_and_pickles_and_directories(tmp_path: Path) -> None:
    weights = _weights(torch.bfloat16)
    names = sorted(weights)
    index = {"weight_map": {}}
    for number, part in enumerate((names[:3], names[3:])):
        name = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in part}, tmp_path / name)
        index["weight_map"] |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "pickle").mkdir()
    torch.save(weights, tmp_path / "pickle" / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", tmp_path / "pickle"):
        model = Network()
        load_pretrained(model, path)
        _assert_loaded(model, weights)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("'model-1.safetensors' is not in its folder; copy all")):
        load_pretrained(Network(), tmp_path)
    with pytest.raises(FileNotFoundError, match="do not exist; pass a directory"):
        load_pretrained(Network(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has none of model"):
        load_pretrained(Network(), tmp_path / "empty")


def test_missing_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"which needs the package safetensors; `pip install safetensors`"):
        load_pretrained(Network(), file)
    with deferred_init(min_bytes=0):
        assert is_deferred(nn.Linear(2, 2).weight)


def test_pickles_that_would_run_code_are_not_read(tmp_path: Path) -> None:
    torch.save({"up.weight": Path("a")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="weights_only"):
        load_pretrained(Network(), tmp_path)


@pytest.mark.parametrize("as_mapping", [False, True])
def test_renames(tmp_path: Path, as_mapping: bool) -> None:
    weights = _weights()
    old = {f"transformer.{name}": value for name, value in weights.items()} | {"step": torch.zeros(1)}
    save_file(old, tmp_path / "model.safetensors")
    model = Network()
    rename: Any = lambda name: None if name == "step" else name.removeprefix("transformer.")  # noqa: E731
    if as_mapping:
        rename = {name: rename(name) for name in old}
    report = load_pretrained(model, tmp_path, rename=rename)
    _assert_loaded(model, weights)
    assert report.unexpected == ("step",)
    with pytest.raises(ValueError, match=re.escape("got two tensors for 'up.weight': ")):
        load_pretrained(model, tmp_path, rename=lambda name: "up.weight")


def test_module_inside_is_filled(file: Path) -> None:
    outer = nn.Module()
    outer.network, outer.loss = Network(), nn.Linear(2, 2)
    report = load_pretrained(outer, file)
    _assert_loaded(outer.network, _weights())
    assert report.missing == () and "network.up.weight" in report.loaded


def test_all_misfits_are_one_error(tmp_path: Path) -> None:
    weights = _weights()
    del weights["up.bias"]
    weights["down.weight"] = torch.zeros(10, 14)
    weights |= {f"extra.{number:02}": torch.zeros(1) for number in range(12)}
    save_file(weights, tmp_path / "model.safetensors")
    model = Network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extra = ", ".join(f"extra.{number:02}" for number in range(10))
    text = (
        f"missing: up.bias; unexpected: {extra} and 2 more; of another shape: down.weight (10, 14) instead of (10, 15)"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        load_pretrained(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = load_pretrained(model, tmp_path, strict=False)
    assert report.missing == ("up.bias",) and len(report.unexpected) == 12
    assert report.mismatched == (("down.weight", (10, 14), (10, 15)),)
    assert torch.equal(model.up.weight, weights["up.weight"])
    assert torch.equal(model.up.bias, before["up.bias"]) and torch.equal(model.down.weight, before["down.weight"])


def test_missing_parameters_are_drawn_as_without_a_file(tmp_path: Path) -> None:
    weights = _weights()
    del weights["up.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    torch.manual_seed(3)
    expected = Network()
    torch.manual_seed(3)
    with deferred_init(min_bytes=0):
        model = Network()
    assert load_pretrained(model, tmp_path, strict=False).missing == ("up.weight",)
    materialize(model)
    assert torch.equal(model.up.weight, expected.up.weight)
    assert torch.equal(model.down.weight, weights["down.weight"])


def test_meta_parameters_raise_error(file: Path) -> None:
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match=re.escape("'down.bias' on the meta device, which has no memory")):
        load_pretrained(model, file)


def test_names_of_transformers_are_converted_or_raise_error(tmp_path: Path) -> None:
    path = pretrained.save("llama", tmp_path)
    model = pretrained.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_pretrained(model, path)
    expected = pretrained.build("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    body = AutoModel.from_config(model.config).double()  # without the output layer
    report = load_pretrained(body, path, strict=False)
    assert report.missing == () and report.unexpected == ("lm_head.weight",)
    assert torch.equal(body.embed_tokens.weight, expected["model.embed_tokens.weight"])

    config = AutoConfig.for_model("mixtral", **pretrained.FAMILIES["llama"], num_local_experts=2)
    experts = AutoModelForCausalLM.from_config(config)
    experts.save_pretrained(tmp_path / "experts")
    with pytest.raises(ValueError, match="by a conversion of its own; call from_pretrained inside configure_model"):
        load_pretrained(experts, tmp_path / "experts")

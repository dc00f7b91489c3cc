"""Fine-tuning with PEFT's LoRA equals one device in every layout, and only the adapters have gradients and states."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import weft
from lightning_plugin import test_pretrained
from support import pretrained
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.strategy.sharding.state import state_of

peft = pytest.importorskip("peft")

# The dtypes of the base model, and the difference allowed, relative to the change of the adapters. PEFT makes float32
# adapters for bfloat16.
DTYPES = {torch.float64: 1e-10, torch.bfloat16: 0.1}
STAGES = {"pipeline_cuts": ["network.base_model.model.model.layers.1"], "num_micro_batches": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # as there, with cuts inside the PeftModel
    layout: (ranks, data_ranks, STAGES if options is test_pretrained.STAGES else options)
    for layout, (ranks, data_ranks, options) in test_pretrained.LAYOUTS.items()
}


class Adapted(L.LightningModule):
    """`from_pretrained` and `get_peft_model` in configure_model, as users write it."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self.path, self.dtype_of_base = path, dtype
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        base = pretrained.model_class("llama").from_pretrained(self.path, dtype=self.dtype_of_base)
        torch.manual_seed(7)
        config = peft.LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", task_type="CAUSAL_LM")
        self.network = peft.get_peft_model(base, config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.network(input_ids=batch[..., :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).double(), batch[..., 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def fit(rank: int, world_size: int, folder: Path, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train, save the adapters, and return what is counted on this rank; layout "": one device, saved by PEFT."""
    set_torchrun_environment(rank, world_size)
    strategy: Any = "auto"
    num_data = 1
    if layout:
        _, num_data, options = LAYOUTS[layout]
        strategy = WeftModelParallelStrategy(**{"plan": "auto", "layout": layout, **options})
    model = Adapted(folder / "llama", dtype)
    run = trainer(world_size, strategy, folder / "runs")
    data_rank = rank % num_data if "pp2" in layout else rank // (world_size // num_data)
    run.fit(model, DataLoader(test_pretrained.batches(num_data, data_rank), batch_size=None))
    saved = saved_path(folder, layout, dtype)
    if layout:
        weft.save_pretrained(model, saved)
    else:
        model.network.save_pretrained(saved)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert trained and frozen
    counted = {
        "trained bytes": sum(_local(p).nbytes for p in trained.values()),
        "state bytes": sum(_local(s["momentum_buffer"]).nbytes for s in run.optimizers[0].state.values()),
        "trained dtypes": {p.dtype for p in trained.values()},
        "frozen dtypes": {p.dtype for p in frozen.values()},
        "query styles": {
            state.style
            for name, module in model.named_modules()
            if name.endswith("q_proj.base_layer") and (state := state_of(module)) is not None
        },
        "frozen gradients": [name for name, p in frozen.items() if p.grad is not None],
    }
    if layout:
        weft.save_pretrained(model.network.merge_and_unload(), merged_path(saved))
    return counted


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def merged_path(saved: Path) -> Path:
    return saved.with_name(f"merged {saved.name}") / "llama"


def saved_path(folder: Path, layout: str, dtype: torch.dtype) -> Path:
    return folder / "saved" / f"{layout or 'one device'}, {dtype}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    pretrained.save("llama", folder)
    for dtype in DTYPES:
        run_on_ranks(1, fit, folder=folder, layout="", dtype=dtype)
    return folder


CASES = [*((layout, torch.float64) for layout in LAYOUTS), ("dp2,tp2", torch.bfloat16), ("pp2,dp2", torch.bfloat16)]


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_training_matches_one_device(folder: Path, layout: str, dtype: torch.dtype) -> None:
    results = run_on_ranks(LAYOUTS[layout][0], fit, folder=folder, layout=layout, dtype=dtype)
    ours, theirs = (saved_path(folder, each, dtype) for each in (layout, ""))
    # PEFT writes a README.md of instructions to fill in, too.
    assert sorted(each.name for each in ours.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert pretrained.adapter_config(ours) == pretrained.adapter_config(theirs)
    actual, expected = pretrained.stored(ours), pretrained.stored(theirs)
    assert actual.keys() == expected.keys()
    start = start_of(folder, dtype)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and not torch.equal(value, start[name]), name
        assert (actual[name] - value).norm() <= DTYPES[dtype] * (value - start[name]).norm(), name
    for result in results:
        assert result["frozen gradients"] == []
        if "tp2" in layout:
            assert result["query styles"] == {"column"}  # by heads, in stages too
        num_shards = 2 if "stage 1" in layout else 1  # of the optimizer's states, if the parameters have none
        assert result["state bytes"] == result["trained bytes"] // num_shards
        assert result["frozen dtypes"] == {dtype}
        assert result["trained dtypes"] == {torch.float32 if dtype == torch.bfloat16 else dtype}
    if dtype == torch.float64:
        logits = [logits_of(folder / "llama", each) for each in (ours, theirs, None)]
        merged = logits_of(merged_path(ours), None)
        for each in (logits[0], merged):
            assert (each - logits[1]).norm() <= 1e-10 * (logits[1] - logits[2]).norm()


@functools.cache
def start_of(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the adapters before training, by their names in the file."""
    model = Adapted(folder / "llama", dtype)
    model.configure_model()
    values: dict[str, Tensor] = peft.get_peft_model_state_dict(model.network)
    return values


def logits_of(base: Path, adapter: Path | None) -> Tensor:
    """Return the logits of the model of transformers on one device, with an adapter that PEFT loads."""
    model = pretrained.load(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    logits: Tensor = model(input_ids=pretrained.tokens()).logits
    return logits.detach()

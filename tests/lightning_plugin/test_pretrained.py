"""Fine-tuning a pretrained model with the Trainer and Fabric equals one device, and each rank reads only its shards."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support import pretrained
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import PretrainedCheckpoint, WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.deferred.files import FileTensor

NUM_STEPS = 3
# Each matrix takes at least 16 KiB. Smaller tensors, the five norms, are not deferred: each rank reads them in full.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
NORM_BYTES = 5 * 64 * 8
TOLERANCE = 1e-10
STAGES = {"pipeline_cuts": ["model.layers.1"], "pipeline_module": "network"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # (ranks, data ranks, options)
    "tp2": (2, 1, {}),
    "dp2": (2, 2, {}),
    "dp2, stage 1": (2, 2, {"layout": "dp2", "zero_stage": 1}),
    "pp2": (2, 1, STAGES),
    "dp2,tp2": (4, 2, {}),
    "pp2,tp2": (4, 1, STAGES),
    "pp2,dp2": (4, 2, STAGES),
}


class FineTuned(L.LightningModule):
    """`from_pretrained` in configure_model, as users write it; `path` None: built from its configuration."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path, self.losses = path, []
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        if self.path is None:
            self.network = pretrained.build("llama", seed=8, **SIZES)
        else:
            self.network = pretrained.model_class("llama").from_pretrained(self.path, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.network(input_ids=batch[..., :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[..., 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(num_data: int, data_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    full = torch.randint(3, pretrained.VOCAB, (NUM_STEPS, 8, 9), generator=generator)
    return list(full.chunk(num_data, 1)[data_rank])


def fit(rank: int, world_size: int, path: Path, layout: str, option: bool) -> dict[str, Any]:
    """Return the weights after a run, and the bytes that this rank has read and holds of parameters."""
    set_torchrun_environment(rank, world_size)
    strategy: Any = "auto"
    num_data = 1
    if layout:
        _, num_data, options = LAYOUTS[layout]
        sizes = {"layout": layout, "num_micro_batches": 2} if options is STAGES else {"layout": layout}
        given = {"pretrained": path} if option else {}
        strategy = WeftModelParallelStrategy(plan="auto", **{**sizes, **options, **given})
    model = FineTuned(None if option else path)
    before = FileTensor.num_bytes_read
    saved = path.parent / "saved" / f"{layout}, {option}"
    callbacks = [PretrainedCheckpoint(saved, every_n_steps=2)] if layout else []
    run = trainer(world_size, strategy, path.parent / "runs", callbacks=callbacks)
    data_rank = rank % num_data if "pp2" in layout else rank // (world_size // num_data)
    run.fit(model, DataLoader(batches(num_data, data_rank), batch_size=None))
    held = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())
    read = FileTensor.num_bytes_read - before
    return {"weights": weights(model), "read": read, "held": held}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fine_tuning") / "llama"
    pretrained.build("llama", **SIZES).save_pretrained(path)
    return path


@functools.cache
def one_device(path: Path) -> dict[str, Tensor]:
    [result] = run_on_ranks(1, fit, path=path, layout="", option=False)
    fitted: dict[str, Tensor] = result["weights"]
    return fitted


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_matches_one_device(path: Path, layout: str, option: bool) -> None:
    expected = one_device(path)
    results = run_on_ranks(LAYOUTS[layout][0], fit, path=path, layout=layout, option=option)
    saved = path.parent / "saved" / f"{layout}, {option}"
    assert sorted(each.name for each in saved.iterdir()) == ["step=2", f"step={NUM_STEPS}"]
    last = pretrained.model_class("llama").from_pretrained(saved / f"step={NUM_STEPS}").state_dict()
    middle = pretrained.stored(saved / "step=2")
    assert middle.keys() == last.keys() and not torch.equal(middle["lm_head.weight"], last["lm_head.weight"])
    assert set().union(*(result["weights"] for result in results)) == expected.keys()
    for result in results:
        for name, value in result["weights"].items():
            assert torch.equal(last[name.removeprefix("network.")], value), name
            difference = (value - expected[name]).norm()
            assert difference <= TOLERANCE * expected[name].norm(), name
        assert 0 < result["read"] <= result["held"] + NORM_BYTES


@on_ranks(2)
def test_fabric_reads_shards(rank: int, world_size: int, path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for layout in ("tp2", "dp2"):
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto", layout=layout))
        fabric.launch()
        before = FileTensor.num_bytes_read
        with fabric.init_module(empty_init=True):
            model = pretrained.model_class("llama").from_pretrained(path, dtype=torch.float64)
        assert FileTensor.num_bytes_read - before == NORM_BYTES
        model = fabric.setup(model)
        held = sum(p.to_local().nbytes for p in model.parameters())
        assert 0 < FileTensor.num_bytes_read - before <= held + NORM_BYTES
        expected = pretrained.build("llama", **SIZES).state_dict()
        for name, value in weights(model.module).items():
            assert torch.equal(value, expected[name.removeprefix("_forward_module.")]), name


def output_of_fit(rank: int, world_size: int, path: Path, layout: str, option: bool, bar: bool) -> tuple[str, int]:
    """Return (the standard output of a run, the bytes that this rank has read while its model was sharded)."""
    set_torchrun_environment(rank, world_size)
    given = {"pretrained": path} if option else {}
    strategy = WeftModelParallelStrategy(plan="auto", layout=layout, **given)
    model = FineTuned(None if option else path)
    run = trainer(world_size, strategy, path.parent / "runs", enable_progress_bar=bar, max_steps=1)
    output, before = io.StringIO(), FileTensor.num_bytes_read
    with contextlib.redirect_stdout(output):
        run.fit(model, DataLoader(batches(1, 0), batch_size=None))
    in_configure_model = 0 if option else NORM_BYTES
    return output.getvalue(), FileTensor.num_bytes_read - before - in_configure_model


@pytest.mark.parametrize(("layout", "option"), [("tp2", False), ("tp2", True), ("dp2", False)])
def test_bar_shows_bytes_read(path: Path, layout: str, option: bool) -> None:
    (text, num_read), (other, _) = run_on_ranks(2, output_of_fit, path=path, layout=layout, option=option, bar=True)
    *_, last = [each for each in re.split("[\r\n]", text) if each.startswith("weft reads weights: 100%")]
    size = f"{num_read / 1000:.0f}k"
    assert f"{size}/{size} [" in last and "B/s]" in last
    assert "weft reads" not in other


def test_no_bar_without_progress_bars(path: Path) -> None:
    for text, num_read in run_on_ranks(2, output_of_fit, path=path, layout="tp2", option=False, bar=False):
        assert "weft reads" not in text and num_read > 0


def test_wrong_callback_raises_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"PretrainedCheckpoint got every_n_steps=0; pass a number of steps from 1 on"):
        PretrainedCheckpoint(tmp_path, every_n_steps=0)
    with pytest.raises(ValueError, match=r"got max_shard_size='much'; pass a positive size"):
        PretrainedCheckpoint(tmp_path, max_shard_size="much")
    run = trainer(1, "auto", tmp_path, callbacks=[PretrainedCheckpoint(tmp_path)])
    with pytest.raises(
        TypeError, match=r"PretrainedCheckpoint got a Trainer with a SingleDeviceStrategy; pass strateg"
    ):
        run.fit(FineTuned(None), DataLoader(batches(1, 0), batch_size=None))


@on_ranks(1)
def test_resumed_run_continues_the_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for name, epochs, checkpoint in (("first", 1, None), ("second", 2, tmp_path / "last.ckpt")):
        callbacks = [PretrainedCheckpoint(tmp_path / name, every_n_steps=2)]
        options = {"callbacks": callbacks, "max_epochs": epochs}
        run = trainer(1, WeftModelParallelStrategy(plan="auto"), tmp_path, **options)
        run.fit(FineTuned(None), DataLoader(batches(1, 0), batch_size=None), ckpt_path=checkpoint)
        if checkpoint is None:
            run.save_checkpoint(tmp_path / "last.ckpt")
    assert sorted(each.name for each in (tmp_path / "first").iterdir()) == ["step=2", "step=3"]
    assert sorted(each.name for each in (tmp_path / "second").iterdir()) == ["step=5", "step=6"]


@on_ranks(1)
def test_wrong_module_raises_error(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(1, WeftModelParallelStrategy(plan="auto"), tmp_path)
    run.callbacks.append(PretrainedCheckpoint(tmp_path, module="model"))
    with pytest.raises(ValueError, match=r"got module='model', which FineTuned lacks; pass the name of one of its"):
        run.fit(FineTuned(None), DataLoader(batches(1, 0), batch_size=None))


def test_wrong_options_raise_errors(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ValueError, match="without a plan, which shards what is read; pass plan='auto'"):
        WeftModelParallelStrategy(pretrained=path)
    with pytest.raises(TypeError, match="got pretrained=5; pass the path of a file or a directory"):
        WeftModelParallelStrategy(plan="auto", pretrained=5)
    with pytest.raises(FileNotFoundError, match=r"WeftModelParallelStrategy.* got the pretrained weights"):
        WeftModelParallelStrategy(plan="auto", pretrained=tmp_path / "nowhere")

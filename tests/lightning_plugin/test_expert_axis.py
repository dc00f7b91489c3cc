"""Expert-parallel ranks under the Trainer and Fabric: models with experts train like on one device."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import assert_same_weights, set_torchrun_environment, trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader

from support.extended import extended_unless
from support.hugging_face import EXPERT_CONFIGS, VOCAB, language_model
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import ExpertBalance, ExpertMonitor, WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.checkpoint.manifest import Manifest
from weft.strategy.data_parallel import sharded_states_of
from weft.strategy.data_parallel.local import local_shard

OTHER_FAMILIES = [family for family in EXPERT_CONFIGS if family != "mixtral"]
ROWS, TOKENS, STEPS = 4, 9, 4
# Layout -> (ranks, ranks with different data).
LAYOUTS = {
    "tp1": (1, 1),
    "dp2,ep2": (2, 2),
    "dp4,ep4": (4, 4),
    "dp4,ep2": (4, 4),
    "rep2,dp2,ep2": (4, 4),
    "dp2,ep2,tp2": (4, 2),
    "tp2": (2, 1),
    "dp2,tp2": (4, 2),
    "cp2,ep2": (2, 1),
    "dp2,cp2,ep4": (4, 2),
    "pp2,dp2,ep2": (4, 2),
    "pp2,tp2": (4, 1),
}


class Tokens(L.LightningModule):
    """Trains a language model with experts on the next token; records losses and gradient norms."""

    def __init__(self, family: str = "mixtral", *, clips: bool = True, **changes: Any) -> None:
        super().__init__()
        self.clips = clips
        torch.manual_seed(3)
        self.model = language_model(family, **changes)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        if self.clips:
            self.norms.append(self.trainer.callback_metrics["gradient_norm"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(data_rank: int, num_data: int) -> DataLoader[Any]:
    """Return the rows of one data-parallel rank in each batch of one device."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, VOCAB, (ROWS * STEPS, TOKENS), generator=generator)
    return DataLoader([batch.chunk(num_data)[data_rank] for batch in rows.split(ROWS)], batch_size=None)


def data_rank_of(rank: int, layout: str) -> int:
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d)", layout)}
    return rank // (sizes.get("tp", 1) * sizes.get("cp", 1)) % LAYOUTS[layout][1]


def strategy_of(layout: str, stage: int | None, **options: Any) -> WeftModelParallelStrategy:
    if "pp2" in layout:
        options |= {"pipeline_cuts": ["model.layers.1"], "pipeline_module": "model", "num_micro_batches": 2}
    return WeftModelParallelStrategy(**{"plan": "auto", "layout": layout, "zero_stage": stage, **options})


def fit(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, family: str, **options: Any
) -> dict[str, Any]:
    """Train; return the losses and, without stages, the weights."""
    set_torchrun_environment(rank, world_size)
    module = Tokens(family)
    run = trainer(world_size, strategy_of(layout, stage, **options), folder, gradient_clip_val=0.5, log_every_n_steps=1)
    run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]))
    found = {"losses": module.losses, "norms": module.norms}
    return found if "pp2" in layout else {**found, "weights": weights(module)}


CASES = [
    *((layout, stage, "mixtral") for layout in ("dp2,ep2", "dp4,ep4") for stage in (0, 3)),
    *(("dp4,ep2", stage, "mixtral") for stage in (0, 1, 2, 3)),
    *((layout, stage, "mixtral") for layout in ("dp2,ep2,tp2", "pp2,dp2,ep2") for stage in (1, 3)),
    *((layout, 0, "mixtral") for layout in ("cp2,ep2", "pp2,tp2")),
    ("pp2,dp2,ep2", 3, "deepseek_v3"),  # the first stage has no experts
    *((layout, 3, "mixtral") for layout in ("rep2,dp2,ep2", "dp2,cp2,ep4", "dp2,tp2")),
    *((layout, stage, family) for layout, stage in (("tp2", 0), ("dp4,ep2", 3)) for family in OTHER_FAMILIES),
]
EXTENDED = [
    *(
        ("dp2,ep2", 3, "mixtral"),
        ("dp4,ep4", 0, "mixtral"),
        ("dp2,ep2,tp2", 1, "mixtral"),
        ("pp2,dp2,ep2", 3, "mixtral"),
    ),
    *(("dp4,ep2", 3, family) for family in ("olmoe", "qwen3_moe")),
]
# Further arguments of the strategy and of the Trainer, on dp2,ep2 (zero_stage=0) or dp4,ep2 (zero_stage=3).
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full checkpoints": ({"activation_checkpointing": "full"}, {}),
    "selective checkpoints": ({"activation_checkpointing": "selective"}, {}),
    "steps in the backward": ({"optimizer_in_backward": True}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "not fused": ({"fused_optimizers": False}, {}),
    "sharded sequences": ({"sequence_parallel": True, "activation_checkpointing": "full"}, {}),
}


@functools.cache
def on_one_device(folder: str, family: str) -> dict[str, Any]:
    [result] = run_on_ranks(1, fit, folder=folder, layout="tp1", stage=0, family=family)
    return result


@pytest.mark.parametrize(("layout", "stage", "family"), extended_unless(lambda *case: case not in EXTENDED, CASES))
def test_training_matches_one_device(
    tmp_path_factory: pytest.TempPathFactory, layout: str, stage: int, family: str
) -> None:
    assert_matches_one_device(str(tmp_path_factory.getbasetemp()), layout, stage, family)


SEQUENCES = [("tp2", 0, "deepseek_v3"), ("dp2,ep2,tp2", 3, "mixtral")]
MORE_SEQUENCES = [
    *(("tp2", 0, family) for family in EXPERT_CONFIGS if family != "deepseek_v3"),
    *(("dp2,ep2,tp2", stage, "deepseek_v3") for stage in (0, 3)),
    *(("dp2,ep2,tp2", 1, "mixtral"), ("dp2,tp2", 3, "mixtral"), ("pp2,tp2", 0, "mixtral")),
]


@pytest.mark.parametrize(
    ("layout", "stage", "family"),
    extended_unless(lambda *case: case in SEQUENCES, [*SEQUENCES, *MORE_SEQUENCES]),
)
def test_training_with_sharded_sequences_matches_one_device(
    tmp_path_factory: pytest.TempPathFactory, layout: str, stage: int, family: str
) -> None:
    """The ranks have different numbers of tokens: 9 are not divisible by 2."""
    folder = str(tmp_path_factory.getbasetemp())
    assert_matches_one_device(folder, layout, stage, family, sequence_parallel=True)


def assert_matches_one_device(folder: str, layout: str, stage: int, family: str, **options: Any) -> None:
    expected = on_one_device(folder, family)
    arguments = {"folder": folder, "layout": layout, "stage": stage, "family": family, **options}
    for found in run_on_ranks(LAYOUTS[layout][0], fit, **arguments):
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=0)
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-9, atol=0)
        if "weights" in found:
            assert_same_weights(found["weights"], expected["weights"], 1e-10)


def fit_with_options(
    rank: int, world_size: int, folder: str, layout: str, stage: int, names: list[str]
) -> list[tuple[dict[str, Tensor], dict[str, list[int]], dict[str, float]]]:
    """Train with each of some options; return weights, tokens of the experts, and the logged balance."""
    set_torchrun_environment(rank, world_size)
    found = []
    for name in names:
        options, settings = OPTIONS[name]
        module, monitor = Tokens("mixtral", clips=False), ExpertMonitor(every_n_steps=3)
        run = trainer(world_size, strategy_of(layout, stage, **options), folder, callbacks=[monitor], **settings)
        run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]))
        logged = {key: value.item() for key, value in run.callback_metrics.items() if key.startswith("experts/")}
        found.append((weights(module), monitor.table(), logged))
    return found


def test_options_and_balance_match_one_device(tmp_path: Path) -> None:
    common: dict[str, Any] = {"folder": str(tmp_path), "names": list(OPTIONS)}
    [expected] = run_on_ranks(1, fit_with_options, **common, layout="tp1", stage=0)
    for (name, (_, settings)), (_, table, logged) in zip(OPTIONS.items(), expected, strict=True):
        num_steps = {2: 2, None: 1}[settings.get("accumulate_grad_batches")]  # steps since the log before the end
        for layer, tokens in table.items():
            # Recomputations do not count: a step has 2 experts for each token.
            assert sum(tokens) == num_steps * settings.get("accumulate_grad_batches", 1) * ROWS * TOKENS * 2, name
            assert logged[f"experts/{layer}"] == pytest.approx(max(tokens) * len(tokens) / sum(tokens))
    for layout, stage in (("dp2,ep2", 0), ("dp4,ep2", 3), ("dp2,ep2,tp2", 0)):
        for results in run_on_ranks(LAYOUTS[layout][0], fit_with_options, **common, layout=layout, stage=stage):
            for name, mine, theirs in zip(OPTIONS, results, expected, strict=True):
                assert_same_weights(mine[0], theirs[0], 1e-10)
                assert mine[1:] == theirs[1:], name


def fabric_steps(rank: int, world_size: int, layout: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    set_torchrun_environment(rank, world_size)
    strategy = FabricStrategy(plan="auto", layout=layout, zero_stage=stage)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = Tokens("mixtral").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in loader(data_rank_of(rank, layout), LAYOUTS[layout][1]):
        logits = model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    return losses, {name.removeprefix("_forward_module."): each for name, each in weights(model).items()}


def test_fabric_matches_one_device() -> None:
    [(expected_losses, expected)] = run_on_ranks(1, fabric_steps, layout="tp1", stage=0)
    for layout, stage in (("dp2,ep2", 1), ("dp4,ep2", 3)):
        for losses, found in run_on_ranks(LAYOUTS[layout][0], fabric_steps, layout=layout, stage=stage):
            torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
            assert_same_weights(found, expected, 1e-10)


@on_ranks(1)
def test_sizes_that_do_not_fit_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    with pytest.raises(RuntimeError, match="got 2 expert-parallel ranks in 1 data-parallel ranks; pass a number that"):
        trainer(world_size, strategy_of("dp1,ep2", 0), tmp_path).fit(Tokens("mixtral"), loader(0, 1))
    with pytest.raises(ValueError, match="expert_parallel_size=2; leave these out, or write them into the layout"):
        WeftModelParallelStrategy(layout="dp2", expert_parallel_size=2)


@on_ranks(2)
def test_another_layout_for_a_model_with_sharded_experts_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    module = Tokens("mixtral", clips=False)
    trainer(world_size, strategy_of("dp2,ep2", 0), tmp_path, max_steps=1).fit(module, loader(rank, world_size))
    with pytest.raises(Exception, match="got a layout without expert-parallel ranks for a model whose experts in"):
        trainer(world_size, strategy_of("dp2", 0), tmp_path).fit(module, loader(rank, world_size))


def run_epochs(
    rank: int, world_size: int, folder: str, layout: str, num_epochs: int, ckpt_path: str | None, saves: str | None
) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    module = Tokens("mixtral", clips=False)
    run = trainer(world_size, strategy_of(layout, STAGES.get(layout)), folder, max_epochs=num_epochs)
    run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]), ckpt_path=ckpt_path)
    if saves is not None:
        run.save_checkpoint(saves)
    return {} if "pp2" in layout else weights(module)


STAGES = {"dp2,ep2": 1, "dp4,ep4": 0, "dp4,ep2": 3}


def test_checkpoints_resume_on_other_layouts(tmp_path: Path) -> None:
    """Experts are saved by any number of ranks, and read by any other; optimizer states, too."""
    common: dict[str, Any] = {"folder": str(tmp_path), "ckpt_path": None, "saves": None}
    [expected] = run_on_ranks(1, run_epochs, **common, layout="tp1", num_epochs=2)
    chain = ["dp2,ep2", "dp4,ep4", "pp2,dp2,ep2", "tp2", "dp4,ep2", "tp1"]
    for source, target in itertools.pairwise(chain):
        path = f"{tmp_path}/{source}.ckpt"
        run_on_ranks(LAYOUTS[source][0], run_epochs, **{**common, "saves": path}, layout=source, num_epochs=1)
        case = {**common, "ckpt_path": path, "layout": target, "num_epochs": 2}
        for resumed in run_on_ranks(LAYOUTS[target][0], run_epochs, **case):
            if resumed:
                assert_same_weights(resumed, expected, rtol=1e-9)
    about = Manifest.read(f"{tmp_path}/dp4,ep2.ckpt").about["mesh"]
    assert about == {"data_parallel": 4, "tensor_parallel": 1, "expert_parallel": 2}


def expert_bytes(rank: int, world_size: int, folder: str, layout: str, stage: int) -> dict[str, int]:
    """Return the bytes of this rank's experts: of parameters, gradients and Adam's moments."""
    set_torchrun_environment(rank, world_size)
    module = Adam("qwen3_moe", num_experts=8, clips=False)
    run = trainer(world_size, strategy_of(layout, stage), folder, limit_train_batches=1)
    run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]))
    [optimizer] = run.optimizers
    states = sharded_states_of(optimizer)
    found = {"parameters": 0, "gradients": 0, "moments": 0}
    for name, parameter in module.named_parameters():
        if "experts" in name:
            key = parameter if states is None else states.flat_shard_of(parameter)
            found["parameters"] += local_shard(parameter).nbytes
            found["gradients"] += module.gradient_bytes[name]
            found["moments"] += sum(
                local_shard(optimizer.state[key][each]).nbytes for each in ("exp_avg", "exp_avg_sq")
            )
    return found


class Adam(Tokens):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        named = self.named_parameters()
        self.gradient_bytes = {name: local_shard(p.grad).nbytes for name, p in named if p.grad is not None}


def test_memory_of_experts_is_proportional_to_their_ranks(tmp_path: Path) -> None:
    [full] = run_on_ranks(1, expert_bytes, folder=str(tmp_path), layout="tp1", stage=0)
    assert full["parameters"] == 2 * 8 * 3 * 32 * 24 * 8
    for layout, stage, held, stepped in (
        ("dp2,ep2", 0, 2, 2),
        ("dp4,ep4", 0, 4, 4),
        ("dp4,ep2", 1, 2, 4),
        ("dp4,ep2", 3, 4, 4),
        ("dp2,ep2,tp2", 0, 4, 4),
        ("tp2", 0, 2, 2),
    ):
        for found in run_on_ranks(LAYOUTS[layout][0], expert_bytes, folder=str(tmp_path), layout=layout, stage=stage):
            assert found["parameters"] * held == full["parameters"], layout
            assert found["gradients"] * held == full["gradients"], layout
            assert found["moments"] * stepped == full["moments"], layout


def balanced(
    rank: int, world_size: int, folder: str, layout: str, sequence_parallel: bool = False, **settings: Any
) -> dict[str, Tensor]:
    """Train DeepSeek-V3 with biases of its router that balance it; return them."""
    set_torchrun_environment(rank, world_size)
    module = Tokens("deepseek_v3", clips=False)
    callbacks = [ExpertBalance(rate=0.25)]
    strategy = strategy_of(layout, 0, sequence_parallel=sequence_parallel)
    run = trainer(world_size, strategy, folder, callbacks=callbacks, limit_train_batches=3, **settings)
    run.fit(module, loader(data_rank_of(rank, layout), LAYOUTS[layout][1]))
    return {name: each.clone() for name, each in module.named_buffers() if name.endswith("correction_bias")}


def test_biases_balance_experts(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, balanced, folder=str(tmp_path), layout="tp1")
    [name] = expected
    assert set((expected[name] / 0.25).abs().tolist()) <= {1.0, 3.0} and expected[name].any()
    [twice] = run_on_ranks(1, balanced, folder=str(tmp_path), layout="tp1", accumulate_grad_batches=2)
    assert (twice[name].abs() <= 0.5).all()  # two optimizer steps
    for layout, is_sharded in (("dp2,ep2", False), ("tp2", False), ("tp2", True), ("cp2,ep2", False)):
        case: dict[str, Any] = {"layout": layout, "sequence_parallel": is_sharded}
        for found in run_on_ranks(LAYOUTS[layout][0], balanced, folder=str(tmp_path), **case):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@on_ranks(1)
def test_balance_needs_biases(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(1, "auto", tmp_path, callbacks=[ExpertBalance()])
    with pytest.raises(ValueError, match="ExpertBalance got a Tokens without buffers 'e_score_correction_bias'"):
        run.fit(Tokens("mixtral", clips=False), loader(0, 1))
    with pytest.raises(ValueError, match="ExpertBalance got rate=0; pass a number above 0"):
        ExpertBalance(rate=0)

"""ReplicaCheck: no false alarm in any layout; a bit that one rank flips is found, and named alike on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning_plugin.scripts.pipeline_models import CUTS, Text, pipeline_strategy, text_loader
from lightning_plugin.scripts.plugin_models import (
    NUM_BATCHES,
    Model,
    fixed_data,
    loader,
    set_torchrun_environment,
    trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_plugin import test_expert_axis as experts
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import ReplicaCheck, WeftModelParallelStrategy
from weft.strategy.data_parallel import sharded_states_of
from weft.strategy.data_parallel.local import local_shard
from weft.strategy.faults import replicas

# The parameters of Model: norm.weight and norm.bias, w1, w2 and w3 of feed_forward, scale. AdamW has a "step", an
# "exp_avg" and an "exp_avg_sq" for each; the momentum of SGD is one tensor.
PARAMETERS = 6
STATES = {"adamw": 2, "sgd": 1}


class Momentum(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return super().configure_optimizers()


class Flip(Callback):
    """Flips the lowest bit of this rank's chunk of a parameter, or of a state of it, after step `step` on one rank."""

    def __init__(self, rank: int, parameter: str, state: str = "", step: int = 3) -> None:
        self.rank, self.parameter, self.state, self.step = rank, parameter, state, step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != self.step or dist.get_rank() != self.rank:
            return
        tensor: Tensor = dict(pl_module.named_parameters())[self.parameter]
        if self.state:
            sharded = sharded_states_of(trainer.optimizers[0])
            key = tensor if sharded is None else sharded.flat_shard_of(tensor)
            tensor = trainer.optimizers[0].state[key][self.state]
        values = local_shard(tensor).view(-1).view(torch.uint8)
        values[-min(8, values.numel())] ^= 1
        self.rank = -1


def _strategy(layout: str, **options: Any) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", layout=layout, check_batches=0, **options)


def _data(rank: int, layout: str) -> DataLoader:
    """Return other data for each data-parallel rank."""
    tensor_ranks = 2 if "tp2" in layout else 1
    return loader(fixed_data() + rank // tensor_ranks)


CASES = {  # ranks, layout, options, parameters compared, and how many of them have states that are compared
    "tp2": (2, "tp2", {}, 3, 3),
    "dp2": (2, "dp2", {"zero_stage": 0}, 6, 6),
    "dp2 zero 1": (2, "dp2", {"zero_stage": 1}, 6, 0),
    "dp2 in backward": (2, "dp2", {"zero_stage": 0, "optimizer_in_backward": True}, 6, 6),
    "fsdp2": (2, "dp2", {"zero_stage": 3}, 0, 0),
    "dp2,tp2": (4, "dp2,tp2", {"zero_stage": 0}, 6, 6),
    "dp2,tp2 zero 1": (4, "dp2,tp2", {"zero_stage": 1}, 6, 3),
    "fsdp2,tp2": (4, "dp2,tp2", {"zero_stage": 2}, 3, 3),
    "rep2,dp2": (4, "rep2,dp2", {"zero_stage": 3}, 6, 6),
}


def _fit_equal(rank: int, world_size: int, folder: Path, case: str, optimizer: str) -> None:
    set_torchrun_environment(rank, world_size)
    _, layout, options, num_parameters, num_states = CASES[case]
    check = ReplicaCheck(every_n_steps=2)
    run = trainer(world_size, _strategy(layout, **options), folder, callbacks=[check])
    run.fit(Momentum(optimizer=optimizer), _data(rank, layout))
    num_steps_of_states = PARAMETERS if optimizer == "adamw" else 0  # a "step" is equal on all ranks
    assert check.num_compared == num_parameters + STATES[optimizer] * num_states + num_steps_of_states


@on_ranks(2)
@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("case", ["tp2", "dp2", "fsdp2"])
def test_equal_replicas_of_two_ranks(rank: int, world_size: int, tmp_path: Path, case: str, optimizer: str) -> None:
    _fit_equal(rank, world_size, tmp_path, case, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("case", ["dp2 zero 1", "dp2 in backward"])
def test_equal_replicas_with_other_steps(rank: int, world_size: int, tmp_path: Path, case: str) -> None:
    _fit_equal(rank, world_size, tmp_path, case, "adamw")


@on_ranks(4)
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [("dp2,tp2", "sgd"), ("dp2,tp2 zero 1", "adamw"), ("fsdp2,tp2", "adamw"), ("rep2,dp2", "sgd")],
)
def test_equal_replicas_of_four_ranks(rank: int, world_size: int, tmp_path: Path, case: str, optimizer: str) -> None:
    _fit_equal(rank, world_size, tmp_path, case, optimizer)


def _fit_flipped(rank: int, world_size: int, folder: str, case: str, flip: tuple[Any, ...]) -> tuple[str, int]:
    """Train with a check after each step; return the text of the error, or "", and the steps."""
    set_torchrun_environment(rank, world_size)
    _, layout, options, *_ = CASES[case]
    run = trainer(world_size, _strategy(layout, **options), folder, callbacks=[Flip(*flip), ReplicaCheck(1)])
    try:
        run.fit(Momentum(), _data(rank, layout))
    except RuntimeError as error:
        return str(error), run.global_step
    return "", run.global_step


FLIPS = {  # layout, (rank, parameter, state), the beginning of the error
    "a parameter of tensor ranks": ("tp2", (1, "norm.bias"), "'norm.bias' differs between ranks 0 and 1"),
    "a state of data ranks": (
        "dp2",
        (1, "feed_forward.w1.weight", "exp_avg_sq"),
        "'exp_avg_sq of feed_forward.w1.weight' differs between ranks 0 and 1",
    ),
    "zero 1": ("dp2 zero 1", (1, "scale"), "'scale' differs between ranks 0 and 1"),
    "a step count": ("fsdp2", (1, "scale", "step"), "'step of scale' differs between ranks 0 and 1"),
    "a majority": ("dp2,tp2", (2, "norm.weight"), "'norm.weight' differs on rank 2, of ranks 0, 1, 2 and 3"),
    "a shard": ("dp2,tp2", (3, "feed_forward.w3.weight"), "'feed_forward.w3.weight' differs between ranks 1 and 3"),
    "sharded by FSDP2": ("fsdp2,tp2", (2, "scale", "exp_avg"), "'exp_avg of scale' differs between ranks 2 and 3"),
    "sharded states": ("dp2,tp2 zero 1", (0, "scale", "exp_avg"), "'exp_avg of scale' differs between ranks 0 and 1"),
    "replicas of shards": ("rep2,dp2", (1, "norm.bias"), "'norm.bias' differs between ranks 1 and 3"),
}


@pytest.mark.parametrize("name", FLIPS)
def test_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    case, flip, expected = FLIPS[name]
    results = run_on_ranks(CASES[case][0], _fit_flipped, folder=str(tmp_path), case=case, flip=flip)
    [(text, step)] = set(results)
    assert step == 3
    assert text.startswith(f"ReplicaCheck: after step 3, {expected}"), text
    assert text.endswith(
        "should hold equal values; all were equal after step 2: resume from a checkpoint saved before step 3, without "
        "a device that is faulty."
    ), text


@pytest.mark.parametrize(
    ("case", "flip"),
    [
        ("tp2", (1, "feed_forward.w1.weight")),
        ("fsdp2", (1, "norm.weight")),
        ("dp2 zero 1", (0, "norm.weight", "exp_avg")),
    ],
)
def test_shards_are_not_compared(tmp_path: Path, case: str, flip: tuple[Any, ...]) -> None:
    assert run_on_ranks(2, _fit_flipped, folder=str(tmp_path), case=case, flip=flip) == [("", NUM_BATCHES)] * 2


def _fit_experts(
    rank: int, world_size: int, folder: str, layout: str, stage: int, parameter: str, state: str
) -> tuple[str, int]:
    """Train with AdamW; flip a bit on rank 2, if a parameter is given. Return the error, and the tensors compared."""
    set_torchrun_environment(rank, world_size)
    check, callbacks = ReplicaCheck(1), [Flip(2, parameter, state)] if parameter else []
    module = experts.Adam("mixtral", clips=False)
    data = experts.loader(experts.data_rank_of(rank, layout), 4)
    strategy = experts.strategy_of(layout, stage)
    try:
        trainer(world_size, strategy, folder, callbacks=[*callbacks, check]).fit(module, data)
    except RuntimeError as error:
        return str(error), check.num_compared
    return "", check.num_compared


EXPERTS = "model.model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("layout", "stage", "parameter", "state", "expected"),
    [
        ("dp4,ep2", 0, EXPERTS, "exp_avg", f"'exp_avg of {EXPERTS}' differs between ranks 0 and 2"),
        ("dp4,ep2", 1, EXPERTS, "", f"'{EXPERTS}' differs between ranks 0 and 2"),
        ("dp4,ep2", 0, "model.model.norm.weight", "", "'model.model.norm.weight' differs on rank 2, of ranks 0, 1, 2"),
        ("dp4,ep2", 1, "", "", ""),
        ("dp4,ep2", 3, EXPERTS, "exp_avg", ""),
        ("dp4,ep4", 0, EXPERTS, "", ""),
        ("rep2,dp2,ep2", 3, EXPERTS, "", f"'{EXPERTS}' differs between ranks 0 and 2"),
    ],
)
def test_experts_are_compared(
    tmp_path: Path, layout: str, stage: int, parameter: str, state: str, expected: str
) -> None:
    """Ranks 0 and 2 hold the same experts, unless each rank has its own, or a shard of these."""
    case = {"folder": str(tmp_path), "layout": layout, "stage": stage, "parameter": parameter, "state": state}
    [(text, num_compared)] = set(run_on_ranks(4, _fit_experts, **case))
    assert text.startswith(f"ReplicaCheck: after step 3, {expected}") if expected else not text
    assert num_compared > 0


class Pipelined(Text):
    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit_stages(
    rank: int, world_size: int, folder: str, layout: str, options: dict[str, Any], optimizer: str, flip: Any
) -> tuple[str, int, int]:
    """Return the text of the error, or "", the number of tensors compared, and that of the stage's parameters."""
    set_torchrun_environment(rank, world_size)
    callbacks: list[Any] = [] if flip is None else [Flip(*flip)]
    check = ReplicaCheck(1)
    run = trainer(world_size, pipeline_strategy(layout, **options), folder, callbacks=[*callbacks, check])
    data_ranks = 2 if "dp2" in layout else 1
    text = ""
    try:
        run.fit(Pipelined(optimizer), text_loader(24, 8, rank % 2 if data_ranks > 1 else 0, data_ranks))
    except RuntimeError as error:
        text = str(error)
    return text, check.num_compared, sum(len(group["params"]) for group in run.optimizers[0].param_groups)


TIED = "model.tok_embeddings.weight"  # the head on the last stage has the other copy


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equal_replicas_of_stages(tmp_path: Path, optimizer: str) -> None:
    case = {"folder": str(tmp_path), "optimizer": optimizer, "flip": None}
    tied = 1 + {"sgd": 1, "adamw": 3}[optimizer]
    for options in ({}, {"pipeline_cuts": CUTS[4], "pipeline_schedule": "interleaved"}):
        results = run_on_ranks(2, _fit_stages, layout="pp2", options=options, **case)
        assert [(text, num_compared) for text, num_compared, _ in results] == [("", tied)] * 2
    # In a V, both copies are on rank 0.
    options = {"pipeline_cuts": CUTS[4], "pipeline_schedule": "zbv"}
    results = run_on_ranks(2, _fit_stages, layout="pp2", options=options, **case)
    assert [(text, num_compared) for text, num_compared, _ in results] == [("", 0)] * 2


def test_equal_replicas_of_sharded_stages(tmp_path: Path) -> None:
    """Compared are each parameter's step count, and the tied weight's shard and its two moments."""
    case = {"folder": str(tmp_path), "optimizer": "adamw", "flip": None}
    results = run_on_ranks(4, _fit_stages, layout="pp2,dp2", options={"zero_stage": 3}, **case)
    assert [(text, num_compared) for text, num_compared, _ in results] == [("", 3 + num) for *_, num in results]


def test_flipped_bit_in_a_stage_is_found(tmp_path: Path) -> None:
    """Checks before the flip find that all are equal."""
    case: dict[str, Any] = {"folder": str(tmp_path), "optimizer": "adamw"}
    for flip, expected in (
        ((1, "model.output.weight"), f"'{TIED}' differs between ranks 0 and 1"),
        ((0, TIED, "exp_avg"), f"'exp_avg of {TIED}' differs between ranks 0 and 1"),
    ):
        results = run_on_ranks(2, _fit_stages, layout="pp2", options={}, flip=flip, **case)
        [text] = {text for text, *_ in results}
        assert text.startswith(f"ReplicaCheck: after step 3, {expected}"), text
    case |= {"optimizer": "sgd", "flip": (3, "model.layers.3.attention_norm.weight", "momentum_buffer")}
    results = run_on_ranks(4, _fit_stages, layout="pp2,dp2", options={"zero_stage": 0}, **case)
    [text] = {text for text, *_ in results}
    assert "step 3, 'momentum_buffer of model.layers.3.attention_norm.weight' differs between ranks 2 and 3" in text
    assert "; all were equal after step 2: " in text
    assert [num_compared for _, num_compared, _ in results] == [2 * num_parameters for *_, num_parameters in results]
    assert all(num_parameters > 1 for *_, num_parameters in results)


@on_ranks(2)
def test_one_exchange_for_each_check(rank: int, world_size: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Counts the calls of collectives that the comparison makes, by step."""
    set_torchrun_environment(rank, world_size)
    calls: list[tuple[str, int]] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "barrier")):
                calls.append((name, run.global_step))
            return getattr(dist, name)

    monkeypatch.setattr(replicas, "dist", Counting())
    run = trainer(world_size, _strategy("dp2", zero_stage=0), tmp_path, callbacks=[ReplicaCheck(3)], max_epochs=2)
    run.fit(Momentum(), _data(rank, "dp2"))
    assert calls == [("all_gather_into_tensor", step) for step in (3, 6, 9, 12)]
    calls.clear()
    callbacks = [Flip(1, "scale"), ReplicaCheck(3)]
    run = trainer(world_size, _strategy("dp2", zero_stage=0), tmp_path, callbacks=callbacks)
    with pytest.raises(RuntimeError, match=r"after step 3, 'scale' differs .*; no check came before: resume"):
        run.fit(Momentum(), _data(rank, "dp2"))
    assert calls == [("all_gather_into_tensor", 3), ("all_gather_object", 3)]


@on_ranks(2)
def test_axes_and_accumulation(rank: int, world_size: int, tmp_path: Path) -> None:
    """Only the axes that are named are compared; checks follow optimizer steps, not batches, and the last step."""
    set_torchrun_environment(rank, world_size)
    callbacks = [Flip(1, "norm.weight"), ReplicaCheck(1, axes=["data_parallel"])]
    run = trainer(world_size, _strategy("tp2"), tmp_path, callbacks=callbacks, max_epochs=1)
    run.fit(Momentum(), loader())
    assert callbacks[1].num_compared == 0
    callbacks = [Flip(1, "norm.weight", step=5), ReplicaCheck(4)]
    run = trainer(world_size, _strategy("tp2"), tmp_path, callbacks=callbacks, max_epochs=1)
    with pytest.raises(
        RuntimeError, match=r"after step 6, 'norm.weight' differs .*; all were equal after step 4: resume"
    ):
        run.fit(Momentum(), loader())
    callbacks = [Flip(1, "norm.weight", step=1), ReplicaCheck(1)]
    run = trainer(world_size, _strategy("tp2"), tmp_path, callbacks=callbacks, accumulate_grad_batches=2)
    model = Momentum()
    with pytest.raises(RuntimeError, match=r"after step 1, 'norm.weight' differs"):
        run.fit(model, loader())
    assert len(model.losses) == 2


@on_ranks(1)
def test_wrong_use_raises(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ReplicaCheck got every_n_steps=0; pass a number of steps from 1 on"):
        ReplicaCheck(every_n_steps=0)
    for axes in ("data_parallel", ["dp"], []):
        with pytest.raises(ValueError, match=r"ReplicaCheck got axes=.*; pass a list with some of 'data_replicate', "):
            ReplicaCheck(axes=axes)
    set_torchrun_environment(rank, 1)
    run = trainer(1, DDPStrategy(process_group_backend="gloo"), tmp_path, callbacks=[ReplicaCheck()])
    with pytest.raises(TypeError, match="ReplicaCheck got a Trainer with a DDPStrategy; pass strategy='weft'"):
        run.fit(Momentum(), loader())
    check = ReplicaCheck(1)
    trainer(1, "weft", tmp_path, callbacks=[check]).fit(Momentum(), loader())
    assert check.num_compared == 0

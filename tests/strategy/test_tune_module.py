"""`weft tune --module`: the search over dry runs, the rates of a host, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import yaml
from strategy.dry_run_models import SEQUENCES
from torch import Tensor, nn

import weft_command
from weft.strategy._plan import Cluster
from weft.strategy.dry_run.batches import num_rows_of, with_rows
from weft.strategy.dry_run.process import DryRunProcess
from weft.strategy.dry_run.request import CHECKPOINTING, Request
from weft.strategy.dry_run.step_clock import StepTimes
from weft.strategy.dry_run.training import Prediction
from weft.strategy.tuning import read_cluster, tune_module
from weft.strategy.tuning.profile import HostProfile, profile_host
from weft.strategy.tuning.request import host_bytes, memory_limit_of
from weft.strategy.tuning.result import FoundLayout, Tuning
from weft.strategy.tuning.stages import of_pipeline
from weft.strategy.tuning.trials import Variant

RATES = {"like": "h100", "devices_per_host": 2}
MB = 10**6


class Block(nn.Sequential):
    """An MLP that pretends to have four heads."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.n_heads = 4


class Blocks(nn.Module):
    """Two blocks whose MLPs are sharded by `PLAN`, so that dry runs are short."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


PLAN = {"layers.*.1": "column", "layers.*.3": "row"}
HEADS = {"layers.*.1": {"style": "column", "heads": "n_heads"}, "layers.*.3": "row"}


def rows() -> Tensor:
    return torch.zeros(2, 32, 64)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


OPTIONS: dict[str, Any] = {"batch": rows, "plan": PLAN, "loss_fn": loss}


# -- the search ----------------------------------------------------------------------------------------------


def _variants(num_devices: int, global_rows: int) -> Iterator[Variant]:
    """Yield all variants."""
    for pipeline in _divisors(num_devices):
        for tensor in _divisors(num_devices // pipeline):
            for data in _divisors(num_devices // pipeline // tensor):
                sizes = (num_devices // pipeline // tensor // data, data, tensor)
                if pipeline == 1 or 1 in sizes[:2]:
                    yield from _variants_of(sizes, pipeline, global_rows)


def _variants_of(sizes: tuple[int, int, int], pipeline: int, global_rows: int) -> Iterator[Variant]:
    replicas, data, tensor = sizes
    num_rows, rest = divmod(global_rows, replicas * data)
    if rest:
        return
    counts = _divisors(num_rows)
    if pipeline > 1:
        counts = [each for each in (pipeline, 2 * pipeline, 4 * pipeline, 8 * pipeline) if each <= num_rows]
    stages = (3,) if data == 1 else (3, 2, 1) if pipeline == 1 else (3, 1)
    for stage, is_sharded, kind, in_backward, number in itertools.product(
        stages, (False, True)[:tensor], CHECKPOINTING, (False, True), counts or [num_rows]
    ):
        if in_backward and stage == 1:
            continue
        variant = Variant(
            replicas,
            data,
            tensor,
            stage,
            activation_checkpointing=kind,
            optimizer_in_backward=in_backward,
            sequence_parallel=is_sharded,
            pipeline_parallel=pipeline,
            pipeline_schedule="1f1b" if pipeline > 1 else None,
        )
        yield variant.with_batches(number)


def _request(variant: Variant, global_rows: int, **options: Any) -> Request:
    if variant.has_stages:
        options |= {"num_micro_batches": variant.num_micro_batches, "pipeline_schedule": "1f1b"}
    return Request(
        Blocks,
        variant.layout,
        num_rows=global_rows // variant.num_data // variant.num_batches,
        accumulate_grad_batches=variant.num_batches,
        activation_checkpointing=variant.activation_checkpointing,
        optimizer_in_backward=variant.optimizer_in_backward,
        sequence_parallel=variant.sequence_parallel,
        zero_stage=variant.zero_stage,
        **options,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


Layout = tuple[str, int]  # with the ZeRO stage


def _expected(trials: dict[Layout, list[tuple[float, int]]], limit: int) -> dict[Layout, float]:
    """Return by layout the least seconds of the variants that fit."""
    fitting = {layout: [seconds for seconds, peak in each if peak <= limit] for layout, each in trials.items()}
    return {layout: min(each) for layout, each in fitting.items() if each}


def _found(layouts: Iterable[FoundLayout]) -> dict[Layout, float]:
    return {(each.layout, each.zero_stage): each.step_seconds for each in layouts}


class PlayedProcess:
    """Returns predictions that follow from the request as those of trainings do, without running any."""

    weight_bytes, activation_bytes, impossible_rows = 0, 0, 0
    num_runs = 0
    digest = "a"

    def __enter__(self) -> PlayedProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, request: Request, cluster: Cluster | None = None) -> list[Prediction]:
        PlayedProcess.num_runs += 1
        sizes = request.sizes
        stages, replicas = sizes.pipeline_parallel, sizes.data_replicate
        data, tensor = sizes.data_parallel, sizes.tensor_parallel
        num_rows, batches = 4 if request.num_rows is None else request.num_rows, request.accumulate_grad_batches
        if num_rows == self.impossible_rows:
            raise RuntimeError("Expected more than 1 value per channel")
        if stages > 1 and num_rows // (request.num_micro_batches or 2 * stages) == self.impossible_rows:
            raise RuntimeError("Expected more than 1 value per channel")
        kind = CHECKPOINTING.index(request.activation_checkpointing)
        full = self.weight_bytes // tensor // stages
        shard = full // data
        own = shard if request.zero_stage == 3 else full
        sums = full if batches > 1 else 0
        gradient = shard // 8 if request.optimizer_in_backward and batches == 1 else own
        activations = num_rows * self.activation_bytes // (1, 3, 6)[kind] // (2 if request.sequence_parallel else 1)
        computing = num_rows * batches * (1 + 0.3 * kind) * (1 + 0.05 * tensor) + 2 * batches
        waits = 0.0
        if stages > 1:
            number = request.num_micro_batches or 2 * stages
            activations = activations * min(stages, number) // number // stages
            computing = (computing + 2 * number) / stages
            waits = computing * (stages - 1) / number
        peak = own + 2 * shard + max(gradient, sums) + activations
        computing *= 1.01 if request.sequence_parallel else 1
        if data > 1:
            computing *= 0.8 if request.precision == "bf16-mixed" else 0.95
        waiting = 0.1 * request.zero_stage * batches * (data - 1) + replicas
        times = {"compute": computing, "tensor_parallel": 0.1 * tensor, "data_parallel": waiting, "pipeline": waits}
        memory = {"backward": {"scratch": peak}}
        return [Prediction(1, 0, (), (), memory, (), 4, StepTimes(times, 1.0, 0.0, 1), digest=self.digest)]


@pytest.mark.parametrize(
    ("weight_bytes", "activation_bytes", "impossible_rows", "precision"),
    [
        (80_000, 100, 0, "32-true"),
        (1_000, 5_000, 0, "32-true"),
        (20_000, 1_000, 0, "32-true"),
        (5_000, 3_000, 1, "32-true"),
        (20_000, 1_000, 0, "bf16-mixed"),
    ],
    ids=["large weights", "large activations", "both", "one row is impossible", "mixed precision"],
)
def test_search_finds_what_trying_all_variants_finds(
    monkeypatch: pytest.MonkeyPatch, weight_bytes: int, activation_bytes: int, impossible_rows: int, precision: str
) -> None:
    monkeypatch.setattr(PlayedProcess, "weight_bytes", weight_bytes)
    monkeypatch.setattr(PlayedProcess, "activation_bytes", activation_bytes)
    monkeypatch.setattr(PlayedProcess, "impossible_rows", impossible_rows)
    monkeypatch.setattr("weft.strategy.tuning.modules.DryRunProcess", PlayedProcess)
    trials: dict[Layout, list[tuple[float, int]]] = {}
    for variant in _variants(4, 16):
        request = _request(variant, 16, precision=precision)
        try:
            [prediction] = PlayedProcess().run(request)
        except RuntimeError:
            continue
        assert prediction.times is not None
        peak = prediction.phases["backward"]["scratch"]
        trials.setdefault((variant.layout, variant.zero_stage), []).append(
            (sum(prediction.times.seconds.values()), peak)
        )
    assert len(trials) == 17
    for limit in {peak + change for each in trials.values() for _, peak in each for change in (0, -1)}:
        found = tune_module(Blocks, 4, cluster=RATES, memory=limit, max_results=100, precision=precision)
        assert _found(found.layouts) == _expected(trials, limit), limit
        assert (found.smallest is None) == bool(found.layouts)
        best = tune_module(Blocks, 4, cluster=RATES, memory=limit, max_results=2, precision=precision)
        seconds = sorted(each.step_seconds for each in found.layouts)[:2]
        assert [each.step_seconds for each in best.layouts] == seconds


def test_bounds_save_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas on all devices compute for the shortest time: other layouts need no dry run, except for replicas."""
    monkeypatch.setattr("weft.strategy.tuning.modules.DryRunProcess", PlayedProcess)
    monkeypatch.setattr(PlayedProcess, "num_runs", 0)
    tune_module(Blocks, 4, cluster=RATES, memory="1GB", max_results=1, fixed="pp=1")
    num_runs = PlayedProcess.num_runs
    tune_module(Blocks, 4, cluster=RATES, memory="1GB", max_results=100, fixed="pp=1")
    assert num_runs < PlayedProcess.num_runs - num_runs == 12 + 1  # with one that finds the rows


def test_dry_runs_decide() -> None:
    """With real dry runs of two devices, and a limit that not all layouts reach without further options."""
    cluster = read_cluster(RATES)
    options: dict[str, Any] = {"sequence_parallel": False, "zero_stage": 3}
    trials: dict[Layout, list[tuple[float, int]]] = {}
    with DryRunProcess() as process:
        for variant in _variants(2, 4):
            if variant.sequence_parallel or variant.zero_stage != 3:
                continue
            try:
                predictions = process.run(_request(variant, 4, **OPTIONS), cluster)
            except RuntimeError:  # a stage begins inside of a block with a checkpoint
                assert variant.has_stages and variant.activation_checkpointing != "none"
                continue
            prediction = of_pipeline(predictions, cluster, 2) if variant.has_stages else predictions[0]
            assert prediction.times is not None
            peak = max(sum(usage.values()) for usage in prediction.phases.values())
            trials.setdefault((variant.layout, variant.zero_stage), []).append(
                (sum(prediction.times.seconds.values()), peak)
            )
    peaks = sorted(peak for each in trials.values() for _, peak in each)
    limit = peaks[len(peaks) // 4]
    found = tune_module(Blocks, 2, cluster=RATES, memory=limit, max_results=10, **OPTIONS, **options)
    assert _found(found.layouts) == pytest.approx(_expected(trials, limit), rel=1e-9), limit
    actual = [each.step_seconds for each in found.layouts]
    assert actual == sorted(actual)
    assert all(each.peak_bytes <= limit for each in found.layouts)


def test_tokens_are_sharded_where_that_is_needed() -> None:
    """A limit that tp2 reaches only with sequence parallelism, if nothing else may be changed."""
    module, batch = "strategy.dry_run_models:TextModel", "strategy.dry_run_models:text_batch"
    kept = {"activation_checkpointing": "none", "optimizer_in_backward": False}

    def search(**options: Any) -> Tuning:
        return tune_module(module, 2, batch=batch, cluster=RATES, fixed="tp=2,accumulate=1", **kept, **options)

    [full] = search(sequence_parallel=False).layouts
    [sharded] = search(sequence_parallel=True).layouts
    assert sharded.peak_bytes < full.peak_bytes and not full.sequence_parallel
    assert search(memory=full.peak_bytes).layouts == (full,)
    found = search(memory=full.peak_bytes - 1)
    [needed] = found.layouts
    assert needed.sequence_parallel and needed.bytes == sharded.bytes and needed.seconds == sharded.seconds
    text = str(found)
    options = yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]
    assert options == {"plan": "auto", "layout": "tp2", "sequence_parallel": True}


def test_configuration_and_options_are_kept() -> None:
    options = {**OPTIONS, "activation_checkpointing": "full", "optimizer_in_backward": True}
    found = tune_module(Blocks, 4, cluster=RATES, fixed="accumulate=2, rep=1", global_rows=32, **options)
    assert {(each.layout, each.zero_stage) for each in found.layouts} == {
        ("dp4", 3),
        ("dp4", 2),
        ("dp2,tp2", 3),
        ("dp2,tp2", 2),
        ("tp4", 3),
    }
    for each in found.layouts:
        assert (each.activation_checkpointing, each.optimizer_in_backward) == ("full", True)
        num_data = {"dp4": 4, "dp2,tp2": 2, "tp4": 1}[each.layout]
        assert each.sequences * each.accumulate_grad_batches * num_data == 32 and each.accumulate_grad_batches == 2
    text = str(found)
    assert text.startswith("4 devices of h100, 72 GB each; 32 rows a step; 5 variants compared") and "rows/s" in text
    trainer = yaml.safe_load(text[text.index("trainer:") :])["trainer"]
    assert trainer["strategy"]["init_args"]["plan"] == PLAN


def test_impossible_layouts_are_named() -> None:
    found = tune_module(Blocks, 6, cluster=RATES, global_rows=12, fixed="pp=1,rep=1", **{**OPTIONS, "plan": HEADS})
    assert [each.layout for each in found.layouts] and {name for name, _ in found.rejections} == {"dp2,tp3", "tp6"}
    assert all("4 heads" in reason for _, reason in found.rejections)
    assert "Not possible: dp2,tp3, tp6 (" in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "tune: got num_devices = 0; give a number from 1"),
        ({"layout": "tp2"}, "tune: got the option layout, which the search chooses; leave it out"),
        ({"pipeline_schedule": "2f2b"}, "tune: pipeline_schedule is '2f2b'; pass one of naive, gpipe, 1f1b"),
        ({"optimizer_in_backward": "rows"}, "tune: got optimizer_in_backward='rows', which excludes"),
        ({"fixed": "tp=3"}, "tune: got 2 devices, which no layout divides with the sizes that are fixed"),
        (
            {"global_rows": 3, "fixed": "pp=1,tp=1"},
            "tune: got 2 devices and 3 rows for a step, which no layout divides",
        ),
        ({"fixed": "zero=1", "optimizer_in_backward": True}, "tune: got zero_stage 1 with optimizer_in_backward"),
        ({"fixed": "pp=2", "pipeline_cuts": "layers.9"}, "tune: no layout of 2 devices is valid: .*layers.9"),
        ({"plan": {"layers.*.7": "column"}}, "tune: no layout of 2 devices is valid: .*layers"),
        ({"module": lambda: nn.Linear(1, 1)}, "cannot be sent to a new process"),
    ],
)
def test_invalid_searches_raise_errors(options: dict[str, Any], message: str) -> None:
    arguments = {"module": Blocks, "num_devices": 2, "cluster": RATES, **OPTIONS, **options}
    with pytest.raises(ValueError, match=message):
        tune_module(**arguments)


# -- batches -------------------------------------------------------------------------------------------------


def test_batches_get_the_rows_of_a_layout() -> None:
    batch = {"ids": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0), "table": torch.zeros(5, 2)}
    assert num_rows_of(batch) == 3 and num_rows_of(torch.tensor(1.0)) == 1
    larger, smaller = with_rows(batch, 5), with_rows(batch, 2)
    assert larger["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert smaller["ids"].tolist() == [[0, 1], [2, 3]]
    assert larger["scale"].item() == 2.0 and smaller["table"].shape == (5, 2)
    assert with_rows(batch, 3) is batch


# -- the rates of a host -----------------------------------------------------------------------------------------


def test_profile_is_a_cluster() -> None:
    found = profile_host(2)
    values = dataclasses.asdict(found)
    assert all(values[name] > 0 for name in ("float32_flops", "half_flops", "bytes_per_second", "cores_per_host"))
    assert memory_limit_of(read_cluster(found.to_dict()), None) == found.device_bytes == host_bytes() // 2
    assert found.cores_per_host <= 2 and all(value > 0 for value in found.host_link)
    cluster = read_cluster(found.to_dict())
    assert cluster.name == "cpu" and cluster.float32_flops == pytest.approx(found.float32_flops, rel=1e-3)
    with pytest.raises(ValueError, match="profile: got 0 ranks"):
        profile_host(0)


def test_profiles_are_yaml() -> None:
    found = HostProfile(1e11, 2e11, 1e10, 4e-6, 1.5, 10**9, (1e-5, 3e9), 2e-4)
    assert yaml.safe_load(str(found)) == found.to_dict()
    cluster = pickle.loads(pickle.dumps(read_cluster(found.to_dict())))
    assert (cluster.host_link, cluster.seconds_per_wait) == ((1e-5, 3e9), 2e-4)
    assert "host_link" not in dataclasses.replace(found, host_link=(0.0, 0.0)).to_dict()


# -- the command ---------------------------------------------------------------------------------------------


def _command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    module = ["--module", "strategy.dry_run_models:TextModel", "--batch", "strategy.dry_run_models:text_batch"]
    monkeypatch.setattr(sys, "argv", ["weft", "tune", *module, "--devices", "1", *arguments])
    return weft_command.main()


def test_command_prints_layouts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(monkeypatch, "--cluster", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    [layout] = found["layouts"]
    assert (layout["layout"], layout["sequences"], found["tokens"]) == ("tp1", SEQUENCES, None)
    assert layout["seconds"]["compute"] > 0
    assert _command(monkeypatch, "--memory", "1MB") == 1
    assert "No layout fits into 0.001 GB: the least is" in capsys.readouterr().out
    assert _command(monkeypatch, "--plan", "nothing") == 2
    assert capsys.readouterr().err.startswith("weft tune: ")


def test_command_profiles_this_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["--devices", "1"], 0), (["--devices", "0"], 2)):
        monkeypatch.setattr(sys, "argv", ["weft", "profile", *arguments])
        assert weft_command.main() == status
    printed = capsys.readouterr()
    assert read_cluster(yaml.safe_load(printed.out)).cores_per_host == 1.0
    assert printed.err == "weft profile: got 0 ranks; give a number from 1.\n"


def test_options_of_modules_need_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "tune", "--config", "none.yaml", "--devices", "1", "--plan", "auto"])
    assert weft_command.main() == 2
    assert "--plan is for --module, and --config was given" in capsys.readouterr().err

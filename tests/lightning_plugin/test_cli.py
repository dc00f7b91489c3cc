"""LightningCLI: strategies from YAML, training on several processes, and a saved configuration that is read again."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning_plugin.scripts.as_main import run_as_main

from support.processes import run_script
from support.rank_pool import POOLS
from support.ranks import run_on_ranks

SCRIPT = Path(__file__).parent / "scripts" / "cli.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RULES = {"layers": {"style": "column_row_mlp"}}


def strategy_config(package: str = "weft.lightning", **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"{package}.WeftModelParallelStrategy", "init_args": init_args}


def config_file(path: Path, devices: int, strategy: Any, **more: Any) -> Path:
    trainer = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": 1, "logger": False}
    trainer |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    path.write_text(yaml.safe_dump({"trainer": trainer, **more}))
    return path


@pytest.fixture(scope="module", autouse=True)
def _close_rank_pools_afterwards() -> Iterator[None]:
    yield
    POOLS.close()


def train(folder: Path, devices: int, strategy: Any, on_warm_ranks: bool = False) -> list[dict[str, Any]]:
    """Run the script's `fit` and return each rank's result; the script saves its configuration as `folder/config.yaml`.

    on_warm_ranks: run on the tests' warm ranks, as under torchrun; otherwise the CLI launches the other ranks.
    """
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}}
    folder.mkdir()
    path = config_file(folder / "given.yaml", devices, strategy, seed_everything=1, optimizer=optimizer)
    arguments = ["fit", "--config", str(path)]
    if on_warm_ranks:
        case = {"path": str(SCRIPT), "arguments": arguments, "cwd": str(folder)}
        stdout = "".join(run_on_ranks(devices, run_as_main, **case))
    else:
        result = run_script(SCRIPT, *arguments, cwd=folder, timeout=180.0, env=ENVIRONMENT, warm_processes=devices)
        assert result.returncode == 0, result.stderr
        stdout = result.stdout
    lines = [line.removeprefix("RESULT ") for line in stdout.splitlines() if line.startswith("RESULT ")]
    results = sorted(map(json.loads, lines), key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == list(range(devices))
    assert all(result["steps"] == 4 for result in results)
    # The YAML's optimizer, created before the parameters are sharded, must update the sharded ones.
    assert all(result["moved"] > 0.01 for result in results)
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["devices"] == devices
    return results


def parse_cli(config: Path, *arguments: str, package: str = "lightning.pytorch") -> Any:
    """Return the CLI with its Trainer; launch no other process."""
    model = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    options = {"run": False, "save_config_callback": None, "args": ["--config", str(config), *arguments]}
    return importlib.import_module(f"{package}.cli").LightningCLI(model, **options)


def test_plans_from_mapping_and_dotted_name_train_equally(tmp_path: Path) -> None:
    by_mapping = train(tmp_path / "mapping", 2, strategy_config(plan=RULES, layout="tp2"))
    by_name = train(tmp_path / "name", 2, strategy_config(plan="__main__.rules", zero_stage=0), on_warm_ranks=True)
    for results in (by_mapping, by_name):
        assert all((result["mesh"], result["local_shape"]) == ([1, 2], [6, 8]) for result in results)
    assert by_mapping == by_name


def test_plan_from_file_and_strategy_from_string_train_equally(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(RULES))
    by_file = train(tmp_path / "file", 4, strategy_config(plan=str(plan), layout="dp2,tp2", zero_stage=3))
    by_string = train(tmp_path / "string", 4, "weft_2d", on_warm_ranks=True)
    for results in (by_file, by_string):
        assert all((result["mesh"], result["local_shape"]) == ([2, 2], [3, 8]) for result in results)
    assert by_file == by_string, "the string means plan='auto', which finds the same plan"
    one_device = train(tmp_path / "one_device", 1, strategy_config(plan=RULES), on_warm_ranks=True)[0]
    for sharded, unsharded in zip(by_file[0]["weights"], one_device["weights"], strict=True):
        assert sharded == pytest.approx(unsharded, rel=1e-4, abs=1e-6)


def test_saved_configuration_round_trips(tmp_path: Path) -> None:
    config = config_file(tmp_path / "config.yaml", 4, strategy_config(plan=RULES, layout="dp2,tp2", zero_stage=2))
    cli = parse_cli(config)
    saved = tmp_path / "saved.yaml"
    cli.parser.save(cli.config, saved)
    again = parse_cli(saved).trainer.strategy
    for name in ("_timeout", "_data_parallel_size"):
        assert getattr(again, name) == getattr(cli.trainer.strategy, name), name
    for name in ("_sizes", "options"):
        assert getattr(again._engine, name) == getattr(cli.trainer.strategy._engine, name), name
    assert again.plan.to_dict() == {"layers": "column_row_mlp"} == cli.trainer.strategy.plan.to_dict()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_arguments_from_yaml_and_command_line(tmp_path: Path, package: str) -> None:
    weft_package = {"lightning.pytorch": "weft.lightning"}.get(package, "weft.pytorch_lightning")
    settings = {"plan": "auto", "data_parallel_size": "auto", "tensor_parallel_size": 2, "timeout": "0:00:40"}
    settings |= {"activation_checkpointing": ["layers.*"], "save_distributed_checkpoint": False}
    config = config_file(tmp_path / "config.yaml", 4, strategy_config(weft_package, **settings))
    strategy = parse_cli(config, package=package).trainer.strategy
    assert type(strategy) is importlib.import_module(weft_package).WeftModelParallelStrategy
    assert strategy.plan.is_auto and strategy._timeout == timedelta(seconds=40)
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == ("auto", 2)
    assert strategy._engine.options.activation_checkpointing == ["layers.*"]
    more = ["--trainer.strategy.plan", "{layer: column}", "--trainer.strategy.data_replicate_size", "2"]
    changed = parse_cli(config, *more, package=package).trainer.strategy
    assert changed.plan.to_dict() == {"layer": "column"} and changed._engine._sizes.data_replicate == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere.yaml"], "plan: there is no file 'nowhere.yaml'; pass 'auto'"),
        (["layout", "dp2,xp2"], "has the part 'xp2'"),
        (["zero_stage", "4"], "zero_stage=4; pass 0"),
    ],
)
def test_invalid_arguments_raise_errors_of_weft(tmp_path: Path, arguments: list[str], message: str) -> None:
    config = config_file(tmp_path / "config.yaml", 2, strategy_config(plan="auto"))
    with pytest.raises(ValueError, match=message):
        parse_cli(config, f"--trainer.strategy.{arguments[0]}", arguments[1])

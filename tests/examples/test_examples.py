"""The examples as a user runs them: exit status, printed figures, leftover files and processes."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lightning_plugin.scripts.as_main import run_as_main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft.strategy
from support.example_modules import EXAMPLES, load_example
from support.processes import ProcessTree, on_busy_machine, processes_left, run_script
from support.rank_pool import POOLS
from support.ranks import on_ranks, run_on_ranks
from weft.strategy.planning.layout import Sizes

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}

# These examples import packages that `support/without_optional` hides from other processes; 08 and 12 draw.
WITH_OPTIONAL_PACKAGES = {
    *("05_huggingface.py", "08_pipeline_resnet50.py", "12_pipeline_trainer.py", "13_finetune.py", "15_experts.py"),
}
# The processes of a command that are forks of one with all imports; 02 starts new interpreters.
WARM_PROCESSES = {
    **dict.fromkeys(("04_llama_2d.py", "05_huggingface.py", "06_fabric.py", "07_cli/main.py", "13_finetune.py"), 2),
    **dict.fromkeys(("14_long_context.py", "15_experts.py"), 2),
    **dict.fromkeys(("01_one_op.py", "03_train_text.py", "08_pipeline_resnet50.py", "11_pipeline_messages.py"), 3),
    **{"09_pipeline_lm.py": 5, "10_three_gpus.py": 4, "12_pipeline_trainer.py": 2},
}


def run_example(name: str, *arguments: str, cwd: Path, timeout: float = 240.0, warm_ranks: int = 0) -> str:
    """Run an example to completion and return its stdout; fail if one of its processes is still running.

    warm_ranks: run the example, as torchrun would, on this many ranks that have already imported torch and Lightning;
        the stdout is that of rank 0. With 0, start the example as a command, as at least one run of each example must.
    """
    if warm_ranks:
        case = {"path": str(EXAMPLES / name), "arguments": list(arguments), "cwd": str(cwd)}
        return run_on_ranks(warm_ranks, run_as_main, timeout=timeout, **case)[0]
    options = {"cwd": cwd, "env": ENV, "timeout": timeout, "warm_processes": WARM_PROCESSES.get(name, 0)}
    options["has_optional_packages"] = name in WITH_OPTIONAL_PACKAGES
    result = run_script(EXAMPLES / name, *arguments, **options)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks_afterwards() -> Iterator[None]:
    yield
    POOLS.close()


def test_one_op_matches_unsharded(tmp_path: Path) -> None:
    stdout = run_example("01_one_op.py", cwd=tmp_path)
    figures = dict(re.findall(r"^(y|grad \w+) .*: (\S+)$", stdout, re.MULTILINE))
    assert set(figures) == {"y", "grad x", "grad w1", "grad w2", "grad w3"}
    assert all(float(figure) <= 1e-10 for figure in figures.values())


def test_pipeline_messages_match_full_model(tmp_path: Path) -> None:
    stdout = run_example("11_pipeline_messages.py", cwd=tmp_path)
    figures = dict(re.findall(r"^stage (\d): .*: (\S+)$", stdout, re.MULTILINE))
    assert set(figures) == {"0", "1"} and all(float(figure) <= 1e-12 for figure in figures.values())


def test_resnet_in_two_stages_matches_one_process(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.html"
    stdout = run_example(
        "08_pipeline_resnet50.py", "--schedule", "zero_bubble", "--picture", str(picture), cwd=tmp_path
    )
    losses = re.findall(r"^step \d: loss (\S+) in stages, (\S+) in one process$", stdout, re.MULTILINE)
    assert len(losses) == 3 and all(
        float(ours) == pytest.approx(float(reference), rel=1e-3) for ours, reference in losses
    )
    assert re.search(r"^stages begin at the first layer and at layer\d\.\d$", stdout, re.MULTILINE), stdout
    assert "planned" in picture.read_text() and "measured" in picture.read_text()


def test_language_model_in_stages_matches_one_device(tmp_path: Path) -> None:
    stdout = run_example("09_pipeline_lm.py", "--steps", "6", cwd=tmp_path)
    losses = re.findall(r"^step \d: loss (\S+) on four ranks, (\S+) on one device$", stdout, re.MULTILINE)
    assert len(losses) == 6 and all(
        float(ours) == pytest.approx(float(reference), rel=1e-4) for ours, reference in losses
    )
    line = re.search(r"^parameters: (.*) on the ranks, (\d+) in all$", stdout, re.MULTILINE)
    assert line is not None and all(int(held) < 0.3 * int(line[2]) for held in line[1].split(", "))


def test_resumed_trainer_in_stages_matches_one_device(tmp_path: Path) -> None:
    def epochs(warm_ranks: int, *arguments: str) -> dict[str, list[float]]:
        stdout = run_example("12_pipeline_trainer.py", *arguments, cwd=tmp_path, warm_ranks=warm_ranks)
        rows = re.findall(r"^epoch (\d): loss (\S+), validation loss (\S+), accuracy (\S+)$", stdout, re.MULTILINE)
        return {epoch: [float(figure) for figure in figures] for epoch, *figures in rows}

    expected = epochs(1, "--layout", "none")
    first = epochs(
        0,
        "--epochs",
        "1",
        "--schedule",
        "zero_bubble",
        "--save",
        "half",
        "--picture",
        "timeline.svg",
        "--report",
        "run",
    )
    rest = epochs(1, "--layout", "pp1", "--resume", "half")
    assert (list(expected), list(first), list(rest)) == (["0", "1"], ["0"], ["1"])
    for epoch, figures in {**first, **rest}.items():
        assert figures == pytest.approx(expected[epoch], rel=1e-3), epoch
    assert "measured" in (tmp_path / "timeline.svg").read_text()
    report = json.loads((tmp_path / "run" / "weft_report.json").read_text())
    assert report["points"][-1]["values"]["val_loss"] == pytest.approx(first["0"][1], rel=1e-3)


def test_network_on_three_devices_trains(tmp_path: Path) -> None:
    losses = []
    for options in ([], ["--one-process"]):
        stdout = run_example("10_three_gpus.py", *options, cwd=tmp_path)
        line = re.search(r"^right: (\d+) of 96$", stdout, re.MULTILINE)
        assert line is not None and int(line[1]) > 80, stdout
        losses.append(re.findall(r"loss (\S+), then (\S+)$", stdout, re.MULTILINE))
    assert len(losses[0]) == 1 and losses[0] == losses[1]


def test_tensor_parallel_mlp_matches_one_device(tmp_path: Path) -> None:
    losses = {}
    for devices, warm_ranks in ((1, 1), (2, 0)):
        options = ["--devices", str(devices), "--epochs", "2"]
        stdout = run_example("02_tensor_parallel_mlp.py", *options, cwd=tmp_path, warm_ranks=warm_ranks)
        line = re.search(r"^devices (\d): (\d+) of (\d+) parameters per rank, loss (\S+)$", stdout, re.MULTILINE)
        assert line is not None, stdout
        assert int(line[1]) == devices
        assert int(line[2]) * devices == int(line[3]) == 3 * 256 * 256
        assert "column_row_mlp" in stdout
        losses[devices] = float(line[4])
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert list(tmp_path.iterdir()) == []


def test_plan_file_matches_on_one_and_two_devices(tmp_path: Path) -> None:
    plan = str(EXAMPLES / "plan.yaml")
    stdout = run_example("03_train_text.py", "--devices", "1", "2", "--steps", "25", "--plan", plan, cwd=tmp_path)
    assert "FAILED" not in stdout
    first = re.search(r"first 20 losses, largest relative difference (\S+) ", stdout)
    last = re.search(r"last 20 losses, largest difference (\S+) ", stdout)
    assert first is not None and last is not None, stdout
    assert 0 < float(first[1]) <= 1e-4, "sums in another order cannot agree in all 20 steps to the bit"
    assert float(last[1]) <= 0.02
    rows = re.findall(r"^ +(\d) +([\d,]+) +([\d.]+) +[\d,]+ +[\d.]+$", stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2]
    full, half = (int(row[1].replace(",", "")) for row in rows)
    assert full / 2 < half < 0.6 * full, "all but the norms is sharded"
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_plan_file_equals_auto(rank: int) -> None:
    model = load_example("model")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    rows = []
    for plan in ("auto", EXAMPLES / "plan.yaml"):
        wrapper = nn.ModuleDict({"model": model.Transformer(model.ModelArgs(n_layers=2))})
        weft.parallelize(wrapper, mesh, plan)
        rows.append(weft.strategy.report(wrapper).rows)
        # A rule divides the head count permanently, "auto" only during the forward.
        assert wrapper["model"].layers[1].attention.n_heads == (4 if plan == "auto" else 2)
    assert [dataclasses.replace(row, rule="") for row in rows[0]] == [
        dataclasses.replace(row, rule="") for row in rows[1]
    ]
    assert {row.rule for row in rows[0]} == {"auto", ""}
    assert "model.layers.*.feed_forward" in {row.rule for row in rows[1]}
    styles = {"vocab_embedding", "column", "row", "column_row_mlp", "column_gather_output", "replicate"}
    assert {row.style for row in rows[0]} == styles


def test_llama_resumed_on_another_layout_matches_one_device(tmp_path: Path) -> None:
    def run(warm_ranks: int, *arguments: str) -> tuple[dict[int, float], str]:
        stdout = run_example("04_llama_2d.py", "--steps", "2", *arguments, cwd=tmp_path, warm_ranks=warm_ranks)
        rows = re.findall(r"^step (\d+): loss (\S+)$", stdout, re.MULTILINE)
        return {int(step): float(loss) for step, loss in rows}, stdout

    expected, _ = run(1, "--epochs", "2", "--devices", "1", "--layout", "tp1")
    first, stdout = run(4, "--devices", "4", "--layout", "dp2,tp2", "--save", "half")
    rest, _ = run(0, "--epochs", "2", "--devices", "2", "--layout", "tp2", "--sequence-parallel", "--resume", "half")
    assert list(first) == [1, 2] and list(rest) == [3, 4]
    assert {**first, **rest} == pytest.approx(expected, rel=1e-5)
    assert re.search(r"^model.output.weight +model.output +vocab_head +128x128 ", stdout, re.MULTILINE)
    table = re.findall(r"^ +(\d)((?: +\d+\.\d\d){8})$", stdout, re.MULTILINE)
    assert [int(rank) for rank, _ in table] == [0, 1, 2, 3]
    for _, cells in table:
        total, *categories = (float(cell) for cell in cells.split())
        assert total == pytest.approx(sum(categories), abs=0.05) and total > 1
    assert re.search(r"^[\d,]+ tokens per second$", stdout, re.MULTILINE)


def test_hugging_face_model_matches_on_one_and_two_devices(tmp_path: Path) -> None:
    def run(warm_ranks: int, *arguments: str) -> tuple[list[float], list[str]]:
        options = ["--config", "qwen3", "--steps", "4", "--new-tokens", "8", *arguments]
        stdout = run_example("05_huggingface.py", *options, cwd=tmp_path, warm_ranks=warm_ranks)
        assert "model.lm_head.weight" in stdout or "--stages" in arguments
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", stdout, re.MULTILINE)]
        return losses, re.findall(r"^continuation: (b.*)$", stdout, re.MULTILINE)

    losses, texts = run(1, "--devices", "1")
    assert len(losses) == 4 and losses[3] < losses[0]
    assert [len(ast.literal_eval(text)) for text in texts] == [8, 8]
    two_losses, two_texts = run(0, "--devices", "2")
    assert two_losses == pytest.approx(losses, rel=1e-5) and two_texts == texts
    sharded_losses, sharded_texts = run(2, "--devices", "2", "--strategy", "weft_fsdp")
    assert len(sharded_losses) == 4 and len(sharded_texts) == 1  # each data-parallel rank continues one of the texts
    _, staged_texts = run(2, "--devices", "2", "--stages")  # code after the model's call prints on the last stage only
    assert staged_texts == texts


def test_fabric_resumed_on_another_layout_matches_one_device(tmp_path: Path) -> None:
    def steps(warm_ranks: int, *arguments: str) -> dict[int, list[float]]:
        stdout = run_example("06_fabric.py", *arguments, cwd=tmp_path, warm_ranks=warm_ranks)
        rows = re.findall(r"^step (\d+): loss (\S+), gradient norm (\S+)$", stdout, re.MULTILINE)
        return {int(step): [float(loss), float(norm)] for step, loss, norm in rows}

    expected = steps(1, "--steps", "3", "--devices", "1", "--layout", "tp1", "--accumulate", "1")
    first = steps(4, "--steps", "2", "--devices", "4", "--layout", "dp2,tp2", "--accumulate", "2", "--save", "half")
    rest = steps(0, "--steps", "3", "--devices", "2", "--layout", "tp2", "--accumulate", "2", "--resume", "half")
    assert (list(expected), list(first), list(rest)) == ([0, 1, 2], [0, 1], [2])
    for step, figures in {**first, **rest}.items():
        assert figures == pytest.approx(expected[step], rel=1e-4), step
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_cli_matches_on_all_device_counts(tmp_path: Path) -> None:
    losses = []
    for devices in (1, 2, 4):
        config = EXAMPLES / "07_cli" / f"devices_{devices}.yaml"
        small = ["--data.num_steps", "3", "--data.seq_len", "32", "--model.args.n_layers", "2"]
        options = ["fit", "--config", str(config), *small]
        stdout = run_example("07_cli/main.py", *options, cwd=tmp_path, warm_ranks=0 if devices == 2 else devices)
        line = re.search(r"^devices (\d): (\d+) of (\d+) parameters on rank 0, loss (\S+)$", stdout, re.MULTILINE)
        assert line is not None, stdout
        assert int(line[1]) == devices
        assert int(line[3]) <= int(line[2]) * devices < 1.1 * int(line[3]), "tp2 does not shard the output layer"
        losses.append(float(line[4]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert list(tmp_path.iterdir()) == []


def test_cli_configs_differ_only_in_sizes() -> None:
    rest = []
    for devices in (1, 2, 4, 8):
        config = yaml.safe_load((EXAMPLES / "07_cli" / f"devices_{devices}.yaml").read_text())
        assert config["trainer"].pop("devices") == devices
        layout = config["trainer"]["strategy"]["init_args"].pop("layout")
        assert math.prod(Sizes.parse(layout).resolve(devices, devices)) == devices
        rest.append(config)
    assert all(config == rest[0] for config in rest)


def test_failing_run_fails_comparison(tmp_path: Path) -> None:
    result = run_script(
        EXAMPLES / "03_train_text.py",
        "--devices",
        "1",
        "2",
        "--steps",
        "2",
        "--plan",
        "nowhere.yaml",
        cwd=tmp_path,
        env=ENV,
        timeout=120.0,
        warm_processes=3,
    )
    assert result.returncode == 1
    assert "training on 1 device(s) ended with status 1" in result.stderr


def test_terminated_comparison_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "03_train_text.py", "--devices", "2", "1", "--steps", "100000"]
    with ProcessTree(command, cwd=tmp_path, env=ENV, warm_processes=3) as tree:
        tree.wait_for_text("training on 2 devices")
        deadline = time.monotonic() + on_busy_machine(60.0)
        while len(processes_left(tree.pgid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(processes_left(tree.pgid)) >= 3, "the comparison and two ranks"
        tree.send_signal(signal.SIGTERM)
        assert tree.wait(30.0).returncode == 128 + signal.SIGTERM
        # A rank that is still importing torch detects only afterwards that its launcher is gone.
        deadline = time.monotonic() + on_busy_machine(60.0)
        while processes_left(tree.pgid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_left(tree.pgid) == {}


def test_fine_tuned_adapter_is_read_back(tmp_path: Path) -> None:
    """The first run makes the pretrained model; the second fine-tunes it."""
    first = run_example("13_finetune.py", "--steps", "5", cwd=tmp_path, warm_ranks=2)
    assert "tiny_llama has a pretrained model now" in first
    second = run_example("13_finetune.py", "--steps", "5", cwd=tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["tiny_llama", "tiny_llama_adapter"]
    [figures] = re.findall(r"on one device: loss (\S+) of the pretrained model, (\S+) with the adapters", second)
    [at_start] = re.findall(r"step 0: loss (\S+)", second)
    before, after = map(float, figures)
    assert after < before == pytest.approx(float(at_start), abs=2e-5)


def test_experts_on_any_layout_give_the_losses_of_one_device(tmp_path: Path) -> None:
    """The command is started on two ranks."""
    losses, balances = {}, {}
    for layout, stage, ranks in (("dp1", 1, 1), ("dp2,ep2", 1, 0), ("dp4,ep2", 3, 4)):
        options = ("--layout", layout, "--devices", str(ranks or 2), "--zero-stage", str(stage), "--steps", "2")
        stdout = run_example("15_experts.py", *options, cwd=tmp_path, warm_ranks=ranks)
        losses[layout] = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", stdout)]
        balances[layout] = re.findall(r"tokens of its experts (\[.*?\])", stdout)
        held = {"dp1": "8", "dp2,ep2": "4", "dp4,ep2": "2"}[layout]
        # With warm ranks, the output is that of rank 0.
        assert re.findall(r"holds (\d+) of 8 experts", stdout) == [held] * (1 if ranks else 2)
    assert len(losses["dp1"]) == len(balances["dp1"]) == 2
    for layout in ("dp2,ep2", "dp4,ep2"):
        assert losses[layout] == pytest.approx(losses["dp1"], abs=2e-5)
        assert balances[layout] == balances["dp1"]


def test_long_sequences_on_any_layout_give_the_losses_of_one_device(tmp_path: Path) -> None:
    """The command is started on two ranks; the peak of a rank with half of the tokens is about half as high."""
    arguments = ("--tokens", "512", "--steps", "2")
    peaks, losses = {}, {}
    for layout, ranks in {"cp1": 1, "cp2": 0, "dp2,cp2": 4}.items():
        devices = ("--layout", layout, "--devices", str(ranks or 2))
        stdout = run_example("14_long_context.py", *arguments, *devices, cwd=tmp_path, warm_ranks=ranks)
        losses[layout] = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", stdout)]
        peaks[layout] = float(re.findall(r"peak of rank 0 in MB: total (\S+),", stdout)[0])
    assert len(losses["cp1"]) == 2
    for layout in ("cp2", "dp2,cp2"):
        assert losses[layout] == pytest.approx(losses["cp1"], abs=2e-5)
    assert peaks["cp2"] < 0.6 * peaks["cp1"]
    assert peaks["dp2,cp2"] < 0.36 * peaks["cp1"]

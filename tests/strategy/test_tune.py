"""`weft tune`: its input, its table, its YAML, and that a strategy trains with what it prints."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from strategy.estimated_layouts import estimated_peak

import weft_command
from weft.strategy.estimate.config import read_config
from weft.strategy.tuning import Cluster, Tuning, draw_front, read_cluster, tune_file, tune_training
from weft.strategy.tuning.request import memory_limit_of, read_bytes, read_fixed

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIG = {"model": LLAMA, "batch": {"sequences": 2, "tokens": 64}}


def tune(num_devices: int = 4, config: dict[str, Any] = CONFIG, **options: Any) -> Tuning:
    return tune_training(read_config(config, Path(), "tp1"), num_devices, **{"cluster": "cpu", **options})


def test_memory_is_that_of_the_estimate() -> None:
    for found in tune(max_results=100).layouts:
        assert estimated_peak(found, CONFIG, tokens=64) == found.peak_bytes, found


def test_steps_have_the_global_batch() -> None:
    for found in tune(max_results=100, global_sequences=24).layouts:
        data = [part for part in found.layout.split(",") if not part.startswith(("tp", "pp"))]
        sizes = [int(part.lstrip("redp")) for part in data]
        num_data = 1
        for size in sizes:
            num_data *= size
        assert found.sequences * found.accumulate_grad_batches * num_data == 24, found
    assert tune().global_sequences == 8


def test_less_memory_takes_more_time_until_nothing_fits() -> None:
    found = tune()
    seconds = found.layouts[0].step_seconds
    limit = found.layouts[0].peak_bytes
    while found.layouts:
        assert found.layouts[0].step_seconds >= seconds and found.layouts[0].peak_bytes <= limit
        seconds, limit = found.layouts[0].step_seconds, found.layouts[0].peak_bytes - 1
        found = tune(memory=limit)
    assert found.smallest is not None and found.smallest.peak_bytes == limit + 1
    assert str(found).splitlines()[-1].startswith("No layout fits into 0.0")
    assert "use more devices, or" in str(found)


def test_options_of_the_configuration_are_kept() -> None:
    config = {**CONFIG, "activation_checkpointing": "full", "optimizer_in_backward": True, "optimizer_state": "int8"}
    found = tune(config=config, fixed="tp=2, accumulate=2", max_results=100)
    assert {(each.activation_checkpointing, each.optimizer_in_backward) for each in found.layouts} == {("full", True)}
    assert all("tp2" in each.layout and each.accumulate_grad_batches == 2 for each in found.layouts)
    assert found.options == {"optimizer_state": "int8"}
    accumulated = tune(config={**CONFIG, "accumulate_grad_batches": 2}, max_results=100)
    assert {each.accumulate_grad_batches for each in accumulated.layouts} == {2}


def test_lists_of_formats_are_tried(tmp_path: Path) -> None:
    formats = {"optimizer_state": ["float32", "int8"], "master_weights": ["float32", "split"]}
    config = {**CONFIG, "precision": "bf16-mixed"}
    path = tmp_path / "training.yaml"
    path.write_text(yaml.safe_dump({**config, **formats}))
    alone = [
        tune(config={**config, "optimizer_state": states, "master_weights": weights}, max_results=100, finds_front=True)
        for states, weights in itertools.product(*formats.values())
    ]
    seconds = sorted(each.step_seconds for found in alone for each in found.layouts)
    found = tune_file(path, 4, cluster="cpu", max_results=7, finds_front=True)
    assert [each.step_seconds for each in found.layouts] == seconds[:7]
    assert found.num_candidates == sum(each.num_candidates for each in alone)
    front = [(each.step_seconds, each.peak_bytes) for each in found.front]
    every = [(each.step_seconds, each.peak_bytes) for one in alone for each in one.front]
    assert set(front) == {each for each in every if not any(_beats(other, each) for other in every)}
    best = found.layouts[0]
    assert set(best.formats) == set(formats) and best.strategy_options.items() >= best.formats.items()
    text = str(found)
    options = yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]
    assert options == {"plan": "auto", **best.strategy_options} and "optimizer_state  master_weights  step" in text
    least = min(each.peak_bytes for one in alone for each in one.front)
    nothing = tune_file(path, 4, cluster="cpu", memory=least - 1)
    assert nothing.smallest is not None and nothing.smallest.peak_bytes <= least
    assert nothing.smallest.formats == {"optimizer_state": "int8", "master_weights": "split"}
    assert "optimizer_state int8, master_weights split" in str(nothing)
    path.write_text(yaml.safe_dump({**config, "optimizer_state": []}))
    with pytest.raises(ValueError, match="tune: got no values for optimizer_state"):
        tune_file(path, 4)


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def test_yaml_configures_a_strategy() -> None:
    from weft.lightning import WeftModelParallelStrategy

    plan = {"model.layers.*.mlp": "column_row_mlp"}
    config = {**CONFIG, "batch": {"sequences": 4, "tokens": 64}, "plan": plan}
    everything = tune(fixed="accumulate=2", config=config, max_results=100)
    limit = min(each.peak_bytes for each in everything.layouts if each.activation_checkpointing == "full")
    found = tune(memory=limit, fixed="accumulate=2", config=config)
    assert "activation_checkpointing" in found.layouts[0].strategy_options
    text = str(found)
    trainer = yaml.safe_load(text[text.index("trainer:") :])["trainer"]
    assert trainer["precision"] == "32-true"
    assert trainer["accumulate_grad_batches"] == found.layouts[0].accumulate_grad_batches
    options = trainer["strategy"]["init_args"]
    assert options == {"plan": plan, **found.layouts[0].strategy_options}
    WeftModelParallelStrategy(**options)


@pytest.mark.parametrize(
    ("num_devices", "per_host", "expected"),
    [(8, 8, {"devices": 8}), (16, 8, {"devices": 8, "num_nodes": 2}), (12, 8, {})],
    ids=["one-host", "two-hosts", "unequal-hosts"],
)
def test_yaml_has_the_devices_of_each_host(num_devices: int, per_host: int, expected: dict[str, int]) -> None:
    cluster = {"like": "h100", "devices_per_host": per_host}
    text = str(tune(num_devices, cluster=cluster, max_results=1))
    trainer = yaml.safe_load(text[text.index("trainer:") :])["trainer"]
    assert {name: trainer[name] for name in ("devices", "num_nodes") if name in trainer} == expected


def test_yaml_of_a_pipeline_configures_a_strategy() -> None:
    from weft.lightning import WeftModelParallelStrategy

    found = tune(fixed="pp=2,dp=2,zero=1", max_results=100)
    assert {(each.layout, each.zero_stage) for each in found.layouts} == {("pp2,dp2", 1)}
    assert {len(each.pipeline_cuts) for each in found.layouts} == {1}  # four stages are more than three blocks
    text = str(found)
    assert "waits" in text and "1f1b" in text
    options = yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]
    best = found.layouts[0]
    assert options == {
        "plan": "auto",
        "layout": "pp2,dp2",
        "zero_stage": 1,
        "pipeline_cuts": list(best.pipeline_cuts),
        "num_micro_batches": best.num_micro_batches,
        **({} if best.activation_checkpointing == "none" else {"activation_checkpointing": "full"}),
    }
    WeftModelParallelStrategy(**options)


def test_front_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "front.svg"
    assert _command(monkeypatch, tmp_path, "--devices", "4", "--json", "--draw", str(picture)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == f"drawn: {picture}\n"
    seconds, sizes = ([each[name] for each in found["front"]] for name in ("step_seconds", "peak_bytes"))
    assert seconds == sorted(seconds) and sizes == sorted(sizes, reverse=True) and len(sizes) > 2
    assert found["layouts"][0]["step_seconds"] == seconds[0]
    text = picture.read_text()
    assert text.count("<svg") == 1 and found["front"][0]["layout"] in text and "limit" in text
    with pytest.raises(ValueError, match="there is nothing to draw"):
        draw_front(tune(), picture)
    missing = str(tmp_path / "no" / "front.svg")
    assert _command(monkeypatch, tmp_path, "--devices", "1", "--top", "1", "--draw", missing) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("1 devices of cpu") and "No such file or directory" in printed.err
    monkeypatch.setattr(sys, "argv", ["weft", "tune", "--module", "m:M", "--devices", "2", "--draw", "front.svg"])
    assert weft_command.main() == 2
    assert capsys.readouterr().err.startswith("weft tune: --draw is for --config, and --module was given")


def test_pipelines_have_no_replicas_unless_asked_for() -> None:
    layouts = {each.layout for each in tune(8, fixed="pp=2", max_results=1000).layouts}
    assert layouts and not any("rep" in layout for layout in layouts)
    assert {each.layout for each in tune(8, fixed="pp=2,dp=2", max_results=1000).layouts} == {"pp2,dp2,tp2"}
    replicated = tune(8, fixed="pp=2,rep=2,dp=2", max_results=1000).layouts
    assert {each.layout for each in replicated} == {"pp2,rep2,dp2"}


def test_checkpoints_of_some_blocks() -> None:
    search: dict[str, Any] = {"fixed": "dp=4,zero=3,accumulate=1", "config": {**CONFIG, "optimizer_in_backward": False}}
    everything = tune(**search, max_results=100).layouts
    sizes = {each.activation_checkpointing: each.peak_bytes for each in everything}
    assert set(sizes) == {"none", "selective", "full"}
    found = tune(**search, memory=sizes["none"] - 1, max_results=100).layouts
    kinds = [each.activation_checkpointing for each in found]
    assert "full:1" in kinds and kinds.index("full:1") < kinds.index("full") and "none" not in kinds
    kept = tune(config={**CONFIG, "activation_checkpointing": "full:2"}, max_results=1000).layouts
    assert {each.activation_checkpointing for each in kept} == {"full:2"}
    assert any(each.pipeline_cuts for each in kept)


def test_recomputing_rules_leave_selective_checkpoints_out() -> None:
    plan = {"model.layers.*.mlp": {"style": "column_row_mlp", "recompute": True}}
    found = tune(config={**CONFIG, "plan": plan}, max_results=1000).layouts
    assert "selective" not in {each.activation_checkpointing for each in found}
    with pytest.raises(ValueError, match="a selective checkpoint would keep activations"):
        tune(config={**CONFIG, "plan": plan, "activation_checkpointing": "selective"})


def test_pipeline_of_the_file_does_not_matter(tmp_path: Path) -> None:
    pipeline = {"layout": "pp3", "pipeline_cuts": ["model.layers.1", "model.layers.2"], "num_micro_batches": 4}
    for name, config in (("plain", CONFIG), ("staged", {**CONFIG, **pipeline})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    plain, staged = (tune_file(tmp_path / f"{name}.yaml", 2, cluster="cpu") for name in ("plain", "staged"))
    assert plain == staged


def test_sequence_parallelism_is_tried_and_printed() -> None:
    from weft.lightning import WeftModelParallelStrategy

    search: dict[str, Any] = {"fixed": "tp=4", "max_results": 100}
    found = tune(**search)
    assert {each.sequence_parallel for each in found.layouts} == {False, True}
    assert "seq. parallel" in str(found).splitlines()[2]
    for wanted in (False, True):
        kept = tune(**search, config={**CONFIG, "sequence_parallel": wanted})
        assert {each.sequence_parallel for each in kept.layouts} == {wanted}
        assert {each.step_seconds for each in kept.layouts} == {
            each.step_seconds for each in found.layouts if each.sequence_parallel == wanted
        }
        text = str(kept)
        assert "seq. parallel" not in text
        options = yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]
        assert options.get("sequence_parallel", False) is wanted
        WeftModelParallelStrategy(**options)
    with pytest.raises(ValueError, match=r"'sequence_parallel' is 1; give true or false"):
        tune(config={**CONFIG, "sequence_parallel": 1})


def test_plans_without_a_prediction_leave_sequence_parallelism_out() -> None:
    config = {**CONFIG, "plan": {"model.layers.*.mlp": "column_row_mlp"}}
    found = tune(config=config, fixed="tp=4")
    assert not found.rejections and not any(each.sequence_parallel for each in found.layouts)
    with pytest.raises(ValueError, match="attention and MLP are sharded by column and row rules"):
        tune(config={**config, "sequence_parallel": True}, fixed="tp=4")


def test_zero_stages_are_kept() -> None:
    assert {each.zero_stage for each in tune(fixed="dp=4,zero=0", max_results=100).layouts} == {0}
    assert {each.zero_stage for each in tune(config={**CONFIG, "zero_stage": 2}, max_results=100).layouts} == {2}
    assert {each.zero_stage for each in tune(fixed="dp=4", max_results=100).layouts} == {1, 2, 3}


def test_page_has_what_the_command_prints(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tune.md").read_text()
    config = page.split("```yaml\n# llama.yaml\n")[1].split("```")[0]
    printed = page.split("--cluster h100 --top 3\n")[1].split("```")[0]
    (tmp_path / "llama.yaml").write_text(config)
    assert f"{tune_file(tmp_path / 'llama.yaml', 64, cluster='h100', max_results=3)}\n" == printed
    file = page.split("```yaml\n# cluster.yaml\n")[1].split("```")[0]
    assert read_cluster(yaml.safe_load(file)).devices_per_host == 4


def test_slow_networks_change_the_choice() -> None:
    link = {"seconds_per_message": 1e-5, "bytes_per_second": 1e9}
    slow = {"seconds_per_message": 1e-1, "bytes_per_second": 1e6}
    clusters = [{"like": "cpu", "devices_per_host": 2, "network_link": each} for each in (link, slow)]
    fast_choice, slow_choice = (tune(cluster=cluster, fixed="accumulate=1").layouts[0] for cluster in clusters)
    assert fast_choice.layout != slow_choice.layout


def test_clusters_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("like: h100\ndevices_per_host: 4\nhalf_flops: 5.0e+14\noverlaps: false\n")
    cluster = read_cluster("mine.yaml", tmp_path)
    assert (cluster.devices_per_host, cluster.half_flops, cluster.overlaps) == (4, 5e14, False)
    assert cluster.bytes_per_second == Cluster("h100").bytes_per_second
    assert memory_limit_of(cluster, None) == 72 * 10**9
    assert memory_limit_of(Cluster("cpu"), None) == Cluster("cpu").device_bytes
    assert (read_bytes("75GiB"), read_bytes("1.5 MB"), read_bytes(7)) == (75 * 2**30, 1_500_000, 7)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("tpu", "got the cluster 'tpu'; use one of 'a100'"),
        ("no.yaml", "there is no file 'no.yaml'"),
        ({"half_flops": 1.0}, "give a mapping with 'like'"),
        ({"like": "h100", "speed": 1}, "give a mapping with 'like'"),
        ({"like": "h100", "half_flops": "fast"}, "half_flops = 'fast'; give a number from 0"),
        ({"like": "h100", "half_flops": 0}, "half_flops = 0"),
        ({"like": "h100", "overlaps": 1}, "overlaps = 1; give true or false"),
        ({"like": "h100", "host_link": 1e9}, "host_link = 1000000000.0; give seconds_per_message and bytes_per_second"),
    ],
)
def test_invalid_clusters_raise_errors(cluster: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cluster(cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "got num_devices = 0; give a number from 1"),
        ({"memory": "80"}, None),
        ({"memory": "80 apples"}, "got the memory '80 apples'; give a number of bytes"),
        ({"fixed": "cp=2"}, "got the fixed size 'cp=2'; give pp, rep, dp, tp, accumulate, zero"),
        ({"fixed": "tp=3"}, "no layout divides with the sizes that are fixed"),
        ({"global_sequences": 3, "fixed": "tp=1"}, "got 4 devices and 3 sequences"),
        ({"fixed": "pp=4"}, r"at most as many ranks as the model has blocks"),
        ({"fixed": "pp=2,accumulate=2"}, r"and accumulates nothing\)"),
        ({"config": {**CONFIG, "optimizer_in_backward": "rows"}}, "got optimizer_in_backward: rows"),
        ({"config": {**CONFIG, "model": {**LLAMA, "model_type": "gpt2"}}}, "predicted for llama, mistral, qwen2"),
    ],
)
def test_invalid_searches_raise_errors(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert not tune(**options).layouts
        return
    with pytest.raises(ValueError, match=message):
        tune(**options)


@pytest.mark.parametrize("options", [{"optimizer": "Adagrad"}, {"precision": "16-mixed"}])
def test_steps_stay_after_the_backward_where_needed(options: dict[str, Any]) -> None:
    config = {**CONFIG, **options}
    least = tune(config=config, memory=1).smallest
    assert least is not None and not least.optimizer_in_backward
    assert not any(each.optimizer_in_backward for each in tune(config=config, max_results=100).layouts)
    text = str(tune(config=config))
    trainer = yaml.safe_load(text[text.index("trainer:") :])["trainer"]
    assert ("plugins" in trainer) == ("precision" not in trainer) == ("precision" in options)
    if "optimizer" in options:
        with pytest.raises(ValueError, match="Adagrad does not step inside the backward"):
            tune(config={**config, "optimizer_in_backward": True})


def test_fixed_sizes_are_read() -> None:
    assert read_fixed("") == {}
    assert read_fixed("rep=2,dp = 4, tp=1") == {"data_replicate": 2, "data_parallel": 4, "tensor_parallel": 1}


def _command(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, **config: Any) -> int:
    (folder / "training.yaml").write_text(yaml.safe_dump({**CONFIG, **config}))
    path = str(folder / "training.yaml")
    monkeypatch.setattr(sys, "argv", ["weft", "tune", "--config", path, "--cluster", "cpu", *arguments])
    return weft_command.main()


def test_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(monkeypatch, tmp_path, "--devices", "8", "--top", "2", layout="dp2,tp2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 devices of cpu, 4 GB each; 16 sequences of 64 tokens a step; ")
    assert lines[2].split()[:3] == ["layout", "zero", "batch"]
    assert lines[5].startswith("Not possible: tp8 (model.layers.0.self_attn.k_proj: num_kv_heads = 4 heads")
    assert lines[-1].startswith("# batch size of the loader of each data-parallel rank: ")


def test_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(monkeypatch, tmp_path, "--devices", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = tune_file(tmp_path / "training.yaml", 2, cluster="cpu")
    assert found["layouts"][0]["step_seconds"] == expected.layouts[0].step_seconds
    assert found["layouts"][0]["peak_bytes"] == expected.layouts[0].peak_bytes
    assert len(found["layouts"]) == 5


def test_command_has_a_status_for_each_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _command(monkeypatch, tmp_path, "--devices", "2", "--memory", "1MB") == 1
    assert "No layout fits into 0.001 GB: the least is" in capsys.readouterr().out
    assert _command(monkeypatch, tmp_path, "--devices", "2", "--fix", "tp") == 2
    assert capsys.readouterr().err == (
        "weft tune: got the fixed size 'tp'; give pp, rep, dp, tp, accumulate, zero with a number, as in tp=2.\n"
    )

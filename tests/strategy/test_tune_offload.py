"""`weft tune --config` with optimizer states in CPU memory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from strategy.estimated_layouts import estimated_peak

from weft.strategy.estimate.config import read_config
from weft.strategy.tuning import Cluster, Tuning, read_cluster, tune_file, tune_training
from weft.strategy.tuning.entry import read_training

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIG = {"model": LLAMA, "batch": {"sequences": 1, "tokens": 16}}
PINNED = {**CONFIG, "offload": "none"}


def tune(config: dict[str, Any] = CONFIG, **options: Any) -> Tuning:
    return tune_training(read_config(config, Path(), "tp1"), 4, **{"cluster": "h100", **options})


@pytest.fixture(scope="module")
def least_bytes() -> int:
    """The bytes of the smallest layout without offload."""
    return min(each.peak_bytes for each in tune(PINNED, finds_front=True).front)


def options_of(found: Tuning) -> Any:
    text = str(found)
    return yaml.safe_load(text[text.index("trainer:") :])["trainer"]["strategy"]["init_args"]


def test_states_are_offloaded_if_nothing_fits(least_bytes: int) -> None:
    from weft.lightning import WeftModelParallelStrategy

    fitting, pinned = tune(memory=least_bytes), tune(PINNED, memory=least_bytes)
    assert fitting.layouts == pinned.layouts and not fitting.needs_offload
    assert {each.offload for each in fitting.layouts} == {"none"}
    assert "offload" not in str(fitting)
    found = tune(memory=least_bytes - 1)
    assert found.needs_offload and {each.offload for each in found.layouts} == {"cpu"}
    lines = str(found).splitlines()
    assert "offload  step" in lines[2]
    assert "No layout fits with the optimizer states on the devices: they are in CPU memory." in lines
    options = options_of(found)
    assert options["offload"] == {"optimizer": "cpu"} and "      offload: {optimizer: cpu}" in lines
    assert options == {"plan": "auto", **found.layouts[0].strategy_options}
    WeftModelParallelStrategy(**options)
    assert all(each.peak_bytes < least_bytes and each.bytes["optimizer_state"] == 0 for each in found.layouts)
    assert json.loads(json.dumps(found.to_dict()))["layouts"][0]["offload"] == "cpu"


def test_the_smallest_layout_is_named(least_bytes: int) -> None:
    pinned = tune(PINNED, memory=least_bytes - 1)
    assert not pinned.layouts and pinned.smallest is not None and pinned.smallest.peak_bytes == least_bytes
    assert "most of it optimizer state; use more devices, offload: cpu, or optimizer_state: int8." in str(pinned)
    nothing = tune(memory=1)
    assert nothing.smallest is not None and nothing.smallest.offload == "cpu"
    assert nothing.smallest.peak_bytes < least_bytes
    assert ", offload cpu" in str(nothing) and "offload: cpu" not in str(nothing)


def test_lists_and_values_are_kept(tmp_path: Path, least_bytes: int) -> None:
    path = tmp_path / "training.yaml"

    def of(offload: Any, **options: Any) -> Tuning:
        path.write_text(yaml.safe_dump({**CONFIG, "offload": offload}))
        return tune_file(path, 4, **{"cluster": "h100", "max_results": 1000, **options})

    limit = round(1.5 * least_bytes)
    both = of(["none", "cpu"], memory=limit)
    assert {each.offload for each in both.layouts} == {"none", "cpu"} and not both.needs_offload
    assert both.layouts == tune(CONFIG, memory=limit, max_results=1000, offload=("none", "cpu")).layouts
    without, always = of("none", memory=limit), of("cpu", memory=limit)
    assert {each.offload for each in without.layouts} == {"none"}
    assert {each.offload for each in always.layouts} == {"cpu"}
    kept = {each.step_seconds for each in both.layouts if each.offload == "none"}
    assert kept == {each.step_seconds for each in without.layouts}
    assert {each.step_seconds for each in both.layouts} - kept < {each.step_seconds for each in always.layouts}
    assert 1 not in {each.zero_stage for each in always.layouts}
    assert len(of(["none", "cpu"], memory=limit, finds_front=True).front) >= 2
    assert "offload" not in read_training(path).options
    for wrong in ([], ["disk"], ["none", 1], "disk"):
        with pytest.raises(ValueError, match=r"tune: got offload = \["):
            of(wrong)
    with pytest.raises(ValueError, match="'offload' is True; give none or cpu"):
        of(True)


def test_formats_are_tried_before_offload(tmp_path: Path, least_bytes: int) -> None:
    path = tmp_path / "training.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "optimizer_state": ["float32", "int8"]}))
    found = tune_file(path, 4, cluster="h100", memory=least_bytes - 1)
    assert {(each.formats["optimizer_state"], each.offload) for each in found.layouts} == {("int8", "none")}
    least = tune_file(path, 4, cluster="h100", memory=1).smallest
    assert least is not None
    found = tune_file(path, 4, cluster="h100", memory=least.peak_bytes)
    assert found.needs_offload and {each.offload for each in found.layouts} == {"cpu"}
    assert set(options_of(found)) >= {"optimizer_state", "offload"}


def test_memory_is_that_of_the_estimate() -> None:
    found = tune({**CONFIG, "offload": "cpu"}, max_results=200)
    # Steps in the backward hide copies, except in stages that reduce gradients after the schedule.
    stages = {each.layout for each in found.layouts if not each.optimizer_in_backward}
    assert stages and all("pp" in layout and "dp" in layout for layout in stages)
    for each in found.layouts:
        peak = estimated_peak(each, {**CONFIG, "offload": "cpu", "device": "cuda"}, tokens=16)
        assert peak == each.peak_bytes, each


def test_cpu_ranks_and_other_optimizers_do_not_offload() -> None:
    for search in ({"cluster": "cpu"}, {"config": {**CONFIG, "optimizer": "SGD"}}):
        least = tune(**search, memory=1).smallest
        assert least is not None and least.offload == "none"
        config = {**search.get("config", CONFIG), "offload": "cpu"}
        with pytest.raises(ValueError, match="memory: got offloaded optimizer states"):
            tune(**{**search, "config": config})


def test_hosts_need_memory_for_the_states(least_bytes: int) -> None:
    mine = {"like": "h100", "copy_bytes_per_second": 1e10, "host_bytes_per_second": 2e11, "host_bytes": 1.0e6}
    cluster = read_cluster(mine)
    assert (cluster.copy_bytes_per_second, cluster.host_bytes_per_second, cluster.host_bytes) == (1e10, 2e11, 10**6)
    copied = pickle.loads(pickle.dumps(cluster))
    assert (copied.copy_bytes_per_second, copied.host_bytes_per_second, copied.host_bytes) == (1e10, 2e11, 10**6)
    assert Cluster("cpu").host_bytes == 0 < Cluster("a100").host_bytes
    found = tune(memory=least_bytes - 1, cluster=mine)  # 1 MB is too little
    assert found.smallest is not None and found.smallest.offload == "none"
    with pytest.raises(ValueError, match=r"take more than the 1000000 bytes of CPU memory of a host in each layout"):
        tune({**CONFIG, "offload": "cpu"}, cluster=mine)
    fast, slow = (
        tune({**CONFIG, "offload": "cpu"}, cluster={"like": "h100", "copy_bytes_per_second": rate}).layouts[0]
        for rate in (1e12, 1e8)
    )
    assert slow.seconds["optimizer"] > 10 * fast.seconds["optimizer"]
    with pytest.raises(ValueError, match="the cluster has host_bytes = 0; give a number above 0"):
        read_cluster({**mine, "host_bytes": 0})

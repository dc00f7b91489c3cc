"""The rules of thumb of docs/layouts.md are those of `weft tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.strategy.estimate.config import read_config
from weft.strategy.tuning import FoundLayout, tune_training

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()


def _llama(dim: int, num_layers: int, num_kv_heads: int = 8, vocab_size: int = 128256) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": dim * 7 // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": dim // 128,
        "num_key_value_heads": num_kv_heads,
    }


ONE_BILLION, EIGHT_BILLION = _llama(2048, 16), _llama(4096, 32)


def _best(model: dict[str, Any], num_devices: int, **options: Any) -> FoundLayout:
    batch = {"sequences": 1, "tokens": options.pop("tokens", 4096)}
    config = {"model": model, "batch": batch, "precision": "bf16-mixed"}
    return tune_training(read_config(config, Path(), "tp1"), num_devices, **options).layouts[0]


def _network(bytes_per_second: float) -> dict[str, Any]:
    link = {"seconds_per_message": 1e-5, "bytes_per_second": bytes_per_second}
    return {"like": "h100", "network_link": link}


def _stands_in_row(layout: str, situation: str) -> bool:
    return any(
        f"`layout: {layout}`" in line or f"`{layout}`" in line for line in PAGE.splitlines() if situation in line
    )


@pytest.mark.parametrize("model", [ONE_BILLION, EIGHT_BILLION], ids=["1B", "8B"])
def test_one_host_shards_fully(model: dict[str, Any]) -> None:
    assert _best(model, 8).layout == "dp8" and _stands_in_row("dp8", "One host")


def test_activations_need_checkpoints() -> None:
    best = _best(EIGHT_BILLION, 8, tokens=16384)
    assert best.layout == "dp8" and best.activation_checkpointing.startswith("full")


def test_replicas_are_no_faster_on_one_host() -> None:
    replicas, sharded = (_best(ONE_BILLION, 8, fixed=fixed) for fixed in ("rep=8", "rep=1,dp=8"))
    assert sharded.step_seconds < replicas.step_seconds and sharded.peak_bytes < replicas.peak_bytes


def test_few_samples_and_large_layers_need_tensor_parallelism() -> None:
    situation = "or a step has fewer samples"
    few_samples, large_layers = _best(EIGHT_BILLION, 8, global_sequences=2), _best(_llama(32768, 2, 64, 32000), 8)
    assert few_samples.layout == "dp2,tp4" and _stands_in_row("dp2,tp4", situation)
    assert large_layers.layout == "tp8" and _stands_in_row("tp8", situation)
    assert few_samples.sequence_parallel and large_layers.sequence_parallel


@pytest.mark.parametrize(("rate", "layout"), [(4e10, "dp32"), (1e10, "pp4,dp4,tp2"), (2e9, "pp4,dp8")])
def test_slow_networks_need_other_axes_between_hosts(rate: float, layout: str) -> None:
    situation = "adapter for each device" if layout == "dp32" else "slow network"
    best = _best(EIGHT_BILLION, 32, cluster=_network(rate))
    assert best.layout == layout and _stands_in_row(layout, situation)
    assert best.sequence_parallel == ("tp" in layout)


@pytest.mark.parametrize(("rate", "layout"), [(1e10, "dp16,tp2"), (3e9, "dp4,tp8")])
def test_slow_networks_need_tensor_parallelism_without_pipelines(rate: float, layout: str) -> None:
    best = _best(EIGHT_BILLION, 32, cluster=_network(rate), fixed="pp=1")
    assert best.layout == layout and _stands_in_row(layout, "slow network")
    assert best.sequence_parallel

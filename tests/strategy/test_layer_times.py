"""Measured layer times: `weft profile --config`, their form in a cluster's file, and `weft tune` with them."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import weft_command
from weft.strategy.estimate.config import decoder_of, read_config
from weft.strategy.tuning import Cluster, Tuning, layer_profile, read_cluster, tune_file, tune_training
from weft.strategy.tuning.entry import read_training
from weft.strategy.tuning.layer_profile import _Layers, _played_rank, profile_layers
from weft.strategy.tuning.layer_times import LayerSample, MeasuredLayers
from weft.strategy.tuning.profile import HostProfile

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG: dict[str, Any] = {"model": LLAMA, "batch": {"sequences": 2, "tokens": 16}}
PARTS = ("embedding", "block", "head")


def measured(**changes: Any) -> MeasuredLayers:
    """Return layer times for CONFIG: of one rank, with 16 and 32 rows."""
    model = decoder_of(LLAMA)
    assert model is not None
    seconds = {"embedding": (0.25, 0.5), "block": (1.0, 2.0), "head": (3.0, 5.0)}
    samples = tuple(
        LayerSample(part, 1, rows, 16, rows / 16 * seconds[part][0], rows / 16 * seconds[part][1])
        for rows in (16, 32)
        for part in PARTS
    )
    return MeasuredLayers(**{"model": model, "precision": "32-true", "samples": samples, **changes})


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_profile, "_TOTAL_SECONDS", 0.0)


def tune(layers: MeasuredLayers, config: dict[str, Any] = CONFIG, num_devices: int = 1, **options: Any) -> Tuning:
    cluster = {"like": "cpu", **layers.to_dict()}
    return tune_training(read_config(config, Path(), "tp1"), num_devices, cluster=cluster, **options)


# -- the file of a cluster ------------------------------------------------------------------------------------


def test_layer_times_are_yaml() -> None:
    layers = measured()
    content = yaml.safe_load(str(layers))
    assert content == layers.to_dict()
    cluster = read_cluster({"like": "cpu", **content})
    assert cluster.layer_times is not None
    expected = [(each.part, 1, each.rows, 16, each.forward, each.backward) for each in layers.samples]
    assert cluster.layer_times.samples == expected
    assert Cluster("cpu").layer_times is None


def test_clusters_with_layer_times_are_sent_to_processes() -> None:
    cluster = read_cluster({"like": "cpu", **measured().to_dict()})
    copied = pickle.loads(pickle.dumps(cluster))
    assert copied.layer_times.samples == cluster.layer_times.samples  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(Cluster("h100"))).layer_times is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": None}, "the cluster has layers = None; give a list"),
        ({"layers": [1]}, "the cluster has the layer times 1; give part, whole numbers from 1 for tensor_parallel"),
        ({"layers": [{"part": "block"}]}, "give part, whole numbers"),
        ({"layers_of": {"dim": 32}}, "the cluster has layers_of = {'dim': 32}; give whole numbers from 1 for dim"),
        ({"layers": []}, "got no layer times; give samples of the embedding, a block and the head"),
    ],
)
def test_invalid_layer_times_raise_errors(changes: dict[str, Any], message: str) -> None:
    cluster = {"like": "cpu", **measured().to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        tune_training(read_config(CONFIG, Path(), "tp1"), 1, cluster=cluster)


def test_layer_times_need_their_model() -> None:
    content = measured().to_dict()
    with pytest.raises(ValueError, match="the cluster has 'layers' alone; give both 'layers_of' and 'layers'"):
        read_cluster({"like": "cpu", "layers": content["layers"]})
    content["layers_of"]["precision"] = "half"
    with pytest.raises(ValueError, match="got precision 'half'"):
        read_cluster({"like": "cpu", **content})
    content = measured().to_dict()
    content["layers"][0]["part"] = "tail"
    with pytest.raises(ValueError, match="got the layer part 'tail'"):
        read_cluster({"like": "cpu", **content})


# -- the search -----------------------------------------------------------------------------------------------


def test_steps_take_the_measured_times() -> None:
    [one_batch, two_batches] = (
        tune(measured(), fixed=f"accumulate={number}", config={**CONFIG, "activation_checkpointing": "none"}).layouts[0]
        for number in (1, 2)
    )
    # The batch has 32 rows: three blocks, the embedding and the head, at twice the times of 16 rows.
    assert one_batch.seconds["compute"] == pytest.approx(2 * (3 * (1 + 2) + (0.25 + 0.5) + (3 + 5)), rel=1e-12)
    assert two_batches.seconds["compute"] == pytest.approx(one_batch.seconds["compute"], rel=1e-12)
    recomputing = tune(measured(), config={**CONFIG, "activation_checkpointing": "full"}, fixed="accumulate=1")
    assert recomputing.layouts[0].seconds["recomputation"] == pytest.approx(2 * 3 * 1, rel=1e-12)


def test_results_say_that_layers_are_measured() -> None:
    found = tune(measured())
    assert str(found).startswith("1 devices of cpu with measured layer times, 4 GB each; ")
    assert found.to_dict()["has_measured_layers"] is True
    predicted = tune_training(read_config(CONFIG, Path(), "tp1"), 1, cluster="cpu")
    assert str(predicted).startswith("1 devices of cpu, 4 GB each; ") and not predicted.has_measured_layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": {**LLAMA, "intermediate_size": 64}}, "a model with hidden_dim = 48 for one with 64; measure this"),
        ({"batch": {"sequences": 2, "tokens": 32}}, "sequences of 16 tokens for a training with 32; measure with as"),
        ({"precision": "bf16-mixed"}, "precision 32-true for a training in bf16-mixed; measure this training"),
        ({"plan": {"model.layers.*.mlp": "column_row_mlp"}}, "those of plan auto, for a plan of rules; use plan"),
        (
            {"model": {"feed_forward": {"dim": 8, "hidden_dim": 8}}},
            "of a Llama-like model for one MLP; leave",
        ),
    ],
)
def test_times_of_another_training_raise_errors(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(measured(), config={**CONFIG, **config})
    deeper = {**CONFIG, "model": {**LLAMA, "num_hidden_layers": 5}}
    assert tune(measured(), config=deeper).has_measured_layers


# -- the command ----------------------------------------------------------------------------------------------


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    return weft_command.main()


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    (tmp_path / "training.yaml").write_text(yaml.safe_dump({**CONFIG, "precision": "bf16-mixed", "layout": "dp2"}))
    return str(tmp_path / "training.yaml")


def test_profiles_of_layers_are_clusters_of_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, config_file: str
) -> None:
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    assert _run(monkeypatch, "profile", "--config", config_file, "--tensor", "1,2", "--rows", "16,64") == 0
    printed = capsys.readouterr()
    assert torch.get_num_threads() == threads and not dist.is_initialized()
    assert printed.err.splitlines() == [
        f"weft profile: {number} of 4: {size} tensor-parallel ranks, {rows} rows"
        for number, (size, rows) in enumerate(((1, 16), (1, 64), (2, 16), (2, 64)), 1)
    ]
    content = yaml.safe_load(printed.out)
    assert content["layers_of"] == {
        "dim": 32,
        "hidden_dim": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
        "attention_bias": False,
        "tied": False,
        "precision": "bf16-mixed",
    }
    assert [(each["part"], each["tensor_parallel"], each["rows"]) for each in content["layers"]] == [
        (part, size, rows) for size in (1, 2) for rows in (16, 64) for part in PARTS
    ]
    assert all(each["tokens"] == 16 and each["forward"] > 0 and each["backward"] > 0 for each in content["layers"])

    (tmp_path / "cluster.yaml").write_text(f"like: cpu\n{printed.out}")
    cluster = str(tmp_path / "cluster.yaml")
    options = ("--devices", "2", "--cluster", cluster, "--fix", "tp=2,accumulate=1,pp=1", "--json")
    assert _run(monkeypatch, "tune", "--config", config_file, *options) == 0
    found = json.loads(capsys.readouterr().out)
    # The batch of both ranks has 64 rows, which were measured.
    block, *others = (
        sum(each["forward"] + each["backward"] for each in content["layers"][-3:] if each["part"] == part)
        for part in ("block", "embedding", "head")
    )
    plain = next(each for each in found["layouts"] if each["activation_checkpointing"] == "none")
    assert plain["seconds"]["compute"] == pytest.approx(3 * block + sum(others), rel=1e-9)


def test_command_measures_default_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_file: str
) -> None:
    pytest.importorskip("transformers")
    assert _run(monkeypatch, "profile", "--config", config_file, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    sizes = {(each["tensor_parallel"], each["rows"]) for each in content["layers"]}
    # Sizes that divide two key-value heads; one sequence, the batch of two, and two for each rank.
    assert sizes == {(1, 16), (1, 32), (2, 16), (2, 32), (2, 64)}
    # With little memory for the logits, one sequence is left.
    monkeypatch.setattr(layer_profile, "host_bytes", lambda: 0)
    assert _run(monkeypatch, "profile", "--config", config_file, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert {(each["tensor_parallel"], each["rows"]) for each in content["layers"]} == {(1, 16), (2, 16)}


def test_profiles_measure_rates_and_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_file: str
) -> None:
    pytest.importorskip("transformers")
    rates = HostProfile(1e11, 2e11, 1e10, 4e-6, 1.0, 10**9, (0.0, 0.0))
    monkeypatch.setattr("weft.strategy.tuning.profile.profile_host", lambda num_ranks: rates)
    arguments = ("--devices", "1", "--config", config_file, "--tensor", "2", "--rows", "16", "--device", "cpu")
    assert _run(monkeypatch, "profile", *arguments) == 0
    cluster = read_cluster(yaml.safe_load(capsys.readouterr().out))
    assert cluster.layer_times is not None and len(cluster.layer_times.samples) == len(PARTS)
    assert cluster.float32_flops == 1e11


def test_sharded_parts_have_shards_and_times_of_their_own() -> None:
    pytest.importorskip("transformers")
    training = read_config({**CONFIG, "precision": "bf16-true"}, Path(), "tp1")
    with _played_rank(2):
        layers = _Layers(training, 2, torch.device("cpu"))
        samples = layers.measure(16)
        local = {name: tuple(each.to_local().shape) for name, each in layers._model.named_parameters()}  # type: ignore[operator]
        assert {each.dtype for each in layers._model.parameters()} == {torch.bfloat16}
    block = "model.layers.0"
    assert local[f"{block}.self_attn.q_proj.weight"] == (16, 32)
    assert local[f"{block}.self_attn.k_proj.weight"] == (8, 32)
    assert local[f"{block}.self_attn.o_proj.weight"] == (32, 16)
    assert local[f"{block}.mlp.gate_proj.weight"] == (24, 32)
    assert local[f"{block}.input_layernorm.weight"] == (32,)
    assert local["model.embed_tokens.weight"] == local["lm_head.weight"] == (128, 32)
    assert [(each.part, each.rows, each.tokens) for each in samples] == [(part, 16, 16) for part in PARTS]


def test_borders_are_where_the_block_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts the operators of the model's parts: each part has only its own."""
    pytest.importorskip("transformers")
    training = read_config(CONFIG, Path(), "tp1")
    calls: list[str] = []

    class Clock:
        def now(self) -> int:
            return len(calls)

        def evict(self) -> None:
            pass

        def seconds(self, begin: int, end: int) -> Any:
            return calls[begin:end]

    monkeypatch.setattr(layer_profile, "_CpuClock", Clock)
    with _played_rank(1):
        layers = _Layers(training, 1, torch.device("cpu"))
        model = layers._model
        for name in ("model.embed_tokens", "model.layers.0.self_attn", "model.norm", "lm_head"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: calls.append(f"gradient of {name}"))  # type: ignore[misc]
        steps: list[Any] = layers._step.run(layers._random_tokens(32))
    embedding, block, head, head_gradients, block_gradients, embedding_gradients = steps
    assert embedding == ["model.embed_tokens"] and head == ["model.norm", "lm_head"]
    assert block == ["model.layers.0.self_attn"]
    assert set(head_gradients) == {"gradient of lm_head.weight", "gradient of model.norm.weight"}
    assert embedding_gradients == ["gradient of model.embed_tokens.weight"]
    assert len(block_gradients) == 9 and all(each.startswith("gradient of model.layers.0.") for each in block_gradients)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got neither --devices nor --config; give a number"),
        (
            ["--devices", "1", "--rows", "16"],
            "--rows is for --config, which was not given; give it, or leave --rows",
        ),
        (
            ["--devices", "1", "--config", "FILE", "--device", "cuda"],
            "--devices measures CPU ranks, and --device is",
        ),
        (["--config", "none.yaml"], "there is no file 'none.yaml'"),
        (["--config", "FILE", "--tensor", "two"], "got --tensor 'two'; give whole numbers with commas, such as 1,2,4"),
        (["--config", "FILE", "--tensor", "4"], "got 4 tensor-parallel ranks, which do not divide 4 heads and 2 key-"),
        (["--config", "FILE", "--rows", "24"], "got 24 rows for sequences of 16 tokens; give multiples of 16"),
        (["--config", "FILE", "--tensor", "0"], "got 0 tensor-parallel ranks"),
    ],
)
def test_invalid_arguments_have_messages(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config_file: str,
    arguments: list[str],
    message: str,
) -> None:
    given = [config_file if argument == "FILE" else argument for argument in arguments]
    assert _run(monkeypatch, "profile", *given) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"weft profile: {message}") and not printed.out


def test_other_models_raise_errors(tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    for change in (
        {"model": {"feed_forward": {"dim": 8, "hidden_dim": 8}}},
        {"model": {**LLAMA, "model_type": "gpt2"}},
        {"plan": {"model.layers.*.mlp": "column_row_mlp"}},
    ):
        path.write_text(yaml.safe_dump({**CONFIG, **change}))
        with pytest.raises(ValueError, match="measured for llama, mistral and qwen2 with plan: auto; give such a"):
            profile_layers(path)
    path.write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(ValueError, match="got the device 'tpu'; give cpu or cuda"):
        profile_layers(path, device="tpu")
    path.write_text(yaml.safe_dump({**CONFIG, "precision": "half"}))
    with pytest.raises(ValueError, match="got precision 'half'"):
        profile_layers(path)


@pytest.mark.cuda
def test_layers_are_measured_on_cuda(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "training.yaml"
    for precision in ("32-true", "bf16-mixed"):
        path.write_text(yaml.safe_dump({**CONFIG, "precision": precision}))
        layers = profile_layers(path, tensor_sizes=(2, 1), rows=(32,), device="cuda")
        measured_parts = [(each.part, each.tensor_parallel, each.rows) for each in layers.samples]
        assert measured_parts == [(part, size, 32) for size in (1, 2) for part in PARTS]
        assert all(each.forward >= 0 and each.backward >= 0 for each in layers.samples)
        assert tune(layers, {**CONFIG, "precision": precision}, num_devices=2).has_measured_layers


def test_files_of_tune_can_be_profiled(config_file: str, tmp_path: Path) -> None:
    """A file's layout does not matter, as in `weft tune`."""
    training = read_training(config_file)
    assert training.mesh.size() == 1
    assert tune_file(config_file, 2, cluster={"like": "cpu", **measured(precision="bf16-mixed").to_dict()}).layouts

"""`weft estimate`: its input, its output, and errors of one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.processes import run_process
from weft.strategy.estimate import estimate_file

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

TINY_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 16}


def _write(folder: Path, **config: Any) -> Path:
    config.setdefault("batch", {"sequences": 1, "tokens": 16})
    path = folder / "training.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_command_prints_table_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    path = _write(
        tmp_path,
        model="config.json",
        mesh={"data_parallel": 512, "tensor_parallel": 8},
        batch={"sequences": 1, "tokens": 4096},
        precision="bf16-mixed",
        activation_checkpointing="full",
    )
    command = [sys.executable, "-X", "importtime", "-m", "weft_command", "estimate", "--config", path]
    result = run_process(command, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "import time" in result.stderr and "torch" not in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("70,553,706,496 parameters, 16 bytes each in training: 1128.859 GB in all")
    assert lines[2].startswith("rank 0 and 4095 like it: at most ")
    assert [line.split()[0] for line in lines[3:]] == ["phase", "init", "forward", "backward", "step"]

    result = run_process([*command, "--json"], timeout=100)
    found = json.loads(result.stdout)
    assert found["bytes_per_parameter"] == 16 and found["mesh"] == "data_parallel=512,tensor_parallel=8"
    [rank] = found["ranks"]
    assert rank["num_ranks"] == 4096
    assert rank["peak_bytes"] == max(sum(usage.values()) for usage in rank["phases"].values())
    least = 80 * 4096 * 8192 * 2 + 4096 * 128256 * 4  # the inputs of the blocks in bfloat16, and the loss in float32
    assert least <= rank["phases"]["forward"]["saved_activations"] <= 1.05 * least


def test_different_ranks_are_listed(tmp_path: Path) -> None:
    path = _write(tmp_path, model={"feed_forward": {"dim": 4, "hidden_dim": 5}}, mesh="tensor_parallel=3")
    found = estimate_file(path)
    assert [(rank.rank, rank.num_ranks) for rank in found.ranks] == [(0, 2), (2, 1)]
    assert [rank.phases["init"]["parameters"] for rank in found.ranks] == [2 * 3 * 4 * 4, 1 * 3 * 4 * 4]
    assert "rank 0 and 1 like it" in str(found) and "rank 2: at most" in str(found)


def test_plan_and_options_change_estimate(tmp_path: Path) -> None:
    model = {**LLAMA_70B, "num_hidden_layers": 2}

    def phases_of(**config: Any) -> dict[str, dict[str, int]]:
        [rank] = estimate_file(_write(tmp_path, model=model, mesh="tensor_parallel=2", **config)).ranks
        return rank.phases

    auto = phases_of()
    mlps = phases_of(plan={"model.layers.*.mlp": {"style": "column_row_mlp", "recompute": True}})
    assert mlps["init"]["parameters"] > auto["init"]["parameters"]
    assert phases_of(optimizer="SGD")["step"]["optimizer_state"] == 0
    assert phases_of(optimizer_in_backward=True)["step"]["gradients"] == 0
    embedding = 128256 // 2 * 8192 * 4  # the loop over parameters has two temporaries of the largest one's size
    assert 2 * embedding <= phases_of(fused_optimizers=False)["step"]["scratch"] < auto["step"]["parameters"] * 3
    assert phases_of(empty_init=False)["init"]["parameters"] > 1.5 * auto["init"]["parameters"]


def test_offloaded_states_are_in_cpu_memory(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model": {**LLAMA_70B, "num_hidden_layers": 2}, "mesh": "data_parallel=2"}
    on_device = estimate_file(_write(tmp_path, **config, device="cuda"))
    offloaded = estimate_file(_write(tmp_path, **config, device="cuda", offload="cpu"))
    [before], [after] = on_device.ranks, offloaded.ranks
    states = before.phases["step"]["optimizer_state"]
    assert after.phases["step"] == {**before.phases["step"], "optimizer_state": 0}
    embedding = 128256 // 2 * 8192 * 4  # of 2.1 GB, so that each of the four buffers has 2 GiB
    assert embedding < 2**31 and after.offloaded_bytes == states + 4 * 2**31 and before.offloaded_bytes == 0
    assert (on_device.bytes_per_parameter, offloaded.bytes_per_parameter) == (16, 8)
    assert f", and {after.offloaded_bytes / 1e9:.3f} GB of CPU memory for optimizer states\n" in str(offloaded)
    assert "CPU memory" not in str(on_device)


@pytest.mark.parametrize(("device", "rows"), [("cpu", (1 << 20) // (4096 * 4)), ("cuda", 8192 // 4)])
def test_row_steps_need_no_full_gradient(tmp_path: Path, device: str, rows: int) -> None:
    mlp = {
        "model": {"feed_forward": {"dim": 8192, "hidden_dim": 8192}},
        "mesh": "tensor_parallel=2",
        "device": device,
    }
    full, by_rows = (
        estimate_file(_write(tmp_path, **mlp, optimizer_in_backward=how)).ranks[0].peak_bytes for how in (True, "rows")
    )
    assert full - by_rows == (8192 - rows) * (4096 + 16) * 4  # the sum's gradient, too, is expanded by blocks


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model": LLAMA_70B}, "the configuration has no 'mesh'; give it"),
        ({"model": LLAMA_70B, "mesh": "a", "modle": 1}, "the configuration has 'modle'; the keys are model, mesh"),
        ({"model": LLAMA_70B, "mehs": {}}, "the configuration has 'mehs'; the keys are model, mesh"),
        (
            {"model": LLAMA_70B, "layout": "pp99", "pipeline_cuts": "auto"},
            "with parameters in a LlamaForCausalLM",
        ),
        ({"model": LLAMA_70B, "mesh": {"rows": 2}}, "'mesh' is {'rows': 2}; give whole numbers for pipeline_"),
        ({"model": LLAMA_70B, "mesh": {}, "batch": {"tokens": 5}}, "'batch' is {'tokens': 5}; give whole numbers for"),
        (
            {"model": LLAMA_70B, "mesh": {}, "precision": "16-mixed", "optimizer_in_backward": True},
            "is not supported with precision 16-mixed",
        ),
        (
            {"model": LLAMA_70B, "mesh": {}, "precision": "16-mixed", "optimizer_in_backward": "rows"},
            "is not supported with precision 16-mixed",
        ),
        ({"model": LLAMA_70B, "mesh": {}, "optimizer_in_backward": "columns"}, "'columns'; use true, false or 'rows'"),
        ({"model": LLAMA_70B, "mesh": {}, "offload": ["none", "cpu"]}, "'offload' is ['none', 'cpu']; give none"),
        ({"model": LLAMA_70B, "mesh": {}, "offload": "disk"}, "got offload 'disk'; use one of 'none', 'cpu'"),
        ({"model": LLAMA_70B, "mesh": {}, "offload": "cpu"}, "got offloaded optimizer states for CPU ranks"),
        (
            {"model": TINY_GPT2, "mesh": {}, "offload": "cpu", "device": "cuda"},
            "offload is 'cpu', which is not predicted for model_type 'gpt2'",
        ),
        (
            {"model": LLAMA_70B, "mesh": {"data_parallel": 2}, "optimizer_in_backward": "rows"},
            "has data-parallel ranks, over which full gradients are averaged",
        ),
        ({"model": LLAMA_70B, "mesh": "tensor_parallel=0"}, "tensor_parallel"),
        ({"model": LLAMA_70B, "mesh": {"tensor_parallel": 16}}, "num_kv_heads = 8 heads do not divide over 16"),
        ({"model": LLAMA_70B, "mesh": {}, "batch": {"tokens": 1.5}}, "'batch' is {'tokens': 1.5}"),
        ({"model": LLAMA_70B, "mesh": {}, "optimizer": "Lion"}, "got optimizer 'Lion'; use one of 'SGD'"),
        ({"model": LLAMA_70B, "mesh": {}, "device": "tpu"}, "got device 'tpu'; use one of 'cpu', 'cuda'"),
        ({"model": LLAMA_70B, "mesh": {}, "fused_optimizers": "often"}, "have a value of the wrong type"),
        ({"model": LLAMA_70B, "mesh": {}, "plan": {"x": "row"}}, "pattern 'x' matches no module"),
        ({"model": {"hidden_size": 8}, "mesh": {}}, "the model's configuration has num_attention_heads = None"),
        ({"model": {"model_type": "gpt17"}, "mesh": {}}, "cannot build a model of model_type 'gpt17'"),
        ({"model": {**TINY_GPT2, "n_embd": "x"}, "mesh": {}}, "cannot build a model of model_type 'gpt2'"),
        ({"model": TINY_GPT2, "mesh": {}, "optimizer": "Lion"}, "got optimizer 'Lion'; use one of 'SGD'"),
        ({"model": TINY_GPT2, "mesh": {}, "activation_checkpointing": "some"}, "'some'; use one of 'none'"),
        ({"model": TINY_GPT2, "mesh": "context_parallel=2"}, "has the axis 'context_parallel', for which"),
        ({"model": TINY_GPT2, "mesh": {}, "plan": {"x": "row"}}, "pattern 'x' matches no module"),
        ({"model": LLAMA_70B, "mesh": {}, "layout": "tp2"}, "has both 'mesh' and 'layout'; give one"),
        ({"model": LLAMA_70B, "layout": "tp2,xp2"}, "layout 'tp2,xp2' has the part 'xp2'"),
        ({"model": LLAMA_70B, "layout": 2}, "'layout' is 2; give text such as 'pp2,dp2,tp2'"),
        ({"model": LLAMA_70B, "layout": "dpauto,tp2"}, "leaves a size to the number of devices"),
        ({"model": LLAMA_70B, "layout": "pp2"}, "'pipeline_cuts' is None for 2 pipeline ranks"),
        ({"model": LLAMA_70B, "mesh": {"pipeline_parallel": 2}}, "'pipeline_cuts' is None for 2 pipeline ranks"),
        ({"model": LLAMA_70B, "layout": "tp2", "pipeline_cuts": ["a"]}, "has 'pipeline_cuts' for one pipeline rank"),
        ({"model": LLAMA_70B, "layout": "pp2", "pipeline_cuts": ["a", "b"]}, "makes 3 stages for 2 pipeline ranks"),
        (
            {"model": LLAMA_70B, "layout": "pp2", "pipeline_cuts": ["a"], "pipeline_schedule": "2f2b"},
            "'pipeline_schedule' is '2f2b'; give one of",
        ),
        (
            {"model": LLAMA_70B, "layout": "pp2", "pipeline_cuts": ["a"], "num_micro_batches": 0},
            "'num_micro_batches' is 0; give a whole number from 1 to",
        ),
        (
            {"model": LLAMA_70B, "layout": "pp2", "pipeline_cuts": ["a"], "optimizer_in_backward": "rows"},
            "rows is not supported with pipelines",
        ),
        (
            {"model": {"feed_forward": {"dim": 4, "hidden_dim": 4}}, "layout": "pp2", "pipeline_cuts": ["w2"]},
            "'feed_forward' is one MLP, which cannot be divided",
        ),
        (
            {"model": TINY_GPT2, "layout": "pp2", "pipeline_cuts": ["transformer.x"]},
            "stage 1 is to begin at 'transformer.x'",
        ),
        ({"model": {**LLAMA_70B, "vocab_size": "x"}, "mesh": {}}, "has vocab_size = 'x'; give a whole number from 1"),
        ({"model": {**LLAMA_70B, "num_attention_heads": 0}, "mesh": {}}, "has num_attention_heads = 0"),
        ({"model": LLAMA_70B, "mesh": {}, "plan": None}, "'plan' is None; give auto"),
        ({"model": LLAMA_70B, "mesh": {}, "batch": {"sequences": 1, "tokens": 2**40}}, "give a number from 1 to"),
        ({"model": LLAMA_70B, "mesh": {}, "batch": {"sequences": 1, "tokens": 10**20}}, "give whole numbers for"),
        ({"model": {"feed_forward": {"dim": 3}}, "mesh": {}}, "'feed_forward' is {'dim': 3}; give dim and hidden_dim"),
        ({"model": 3, "mesh": {}}, "'model' is 3; give the path"),
    ],
)
def test_invalid_configurations_raise(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        estimate_file(_write(tmp_path, **config))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_paths_are_relative_to_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    (tmp_path / "plan.yaml").write_text("model.layers.*.mlp: column_row_mlp\n")
    estimate = estimate_file(_write(tmp_path, model="config.json", mesh="tensor_parallel=2", plan="plan.yaml"))
    assert estimate.num_parameters == 70_553_706_496
    (tmp_path / "plan.yaml").write_text("a: row\na: column\n")
    with pytest.raises(ValueError, match=r"the file plan\.yaml gives the pattern 'a' twice"):
        estimate_file(tmp_path / "training.yaml")


def test_layout_equals_mesh(tmp_path: Path) -> None:
    model = {**LLAMA_70B, "num_hidden_layers": 2}
    mesh = "data_replicate=2,data_parallel=4,tensor_parallel=8"
    by_mesh = estimate_file(_write(tmp_path, model=model, mesh=mesh))
    by_layout = estimate_file(_write(tmp_path, model=model, layout="rep2,dp4,tp8"))
    assert by_layout == by_mesh and not by_layout.note
    path = _write(tmp_path, model=model, layout="tp2")
    assert estimate_file(path, layout="rep2,dp4,tp8") == by_mesh
    path = _write(tmp_path, model=model, mesh="tensor_parallel=2")
    assert estimate_file(path, layout="rep2,dp4,tp8") == by_mesh


def test_pipeline_ranks_follow_mesh(tmp_path: Path) -> None:
    pipeline = {"pipeline_cuts": ["transformer.h.1"], "model": TINY_GPT2}
    for mesh, ranks in (
        ("pipeline_parallel=2,data_parallel=2,tensor_parallel=3", [0, 2, 6, 8]),
        ("tensor_parallel=3,data_parallel=2,pipeline_parallel=2", [0, 8, 1, 9]),
    ):
        found = estimate_file(_write(tmp_path, mesh=mesh, **pipeline)).ranks
        assert [(each.rank, each.num_ranks) for each in found] == list(zip(ranks, [4, 2, 4, 2], strict=True))


def test_chosen_cuts_equal_named_ones(tmp_path: Path) -> None:
    model = {**TINY_GPT2, "n_layer": 4}
    chosen = estimate_file(_write(tmp_path, model=model, layout="pp2", pipeline_cuts="auto"))
    assert chosen.cuts == ("transformer.h.2",) and "later stages begin at transformer.h.2" in str(chosen).splitlines()
    named = estimate_file(_write(tmp_path, model=model, layout="pp2", pipeline_cuts=["transformer.h.2"]))
    assert named.ranks == chosen.ranks
    interleaved = {"layout": "pp2", "pipeline_cuts": "auto", "pipeline_schedule": "interleaved"}
    cuts = estimate_file(_write(tmp_path, model=model, **interleaved)).cuts
    assert cuts[:2] == ("transformer.h.1", "transformer.h.2")
    in_v = estimate_file(_write(tmp_path, model=model, **{**interleaved, "pipeline_schedule": "zbv"}))
    assert in_v.cuts == cuts


def test_ends_of_a_v_are_on_the_first_rank(tmp_path: Path) -> None:
    """The tied embedding and head, on stages 0 and 3, are one weight of rank 0."""
    cuts = ["transformer.h.1", "transformer.h.2", "transformer.h.3"]
    config = {"model": {**TINY_GPT2, "n_layer": 4}, "layout": "pp2", "pipeline_cuts": cuts}

    def parameters(schedule: str) -> list[int]:
        ranks = estimate_file(_write(tmp_path, **config, pipeline_schedule=schedule)).ranks
        return [each.phases["step"]["parameters"] for each in ranks]

    in_v, interleaved = parameters("zbv"), parameters("interleaved")
    [full] = [
        each.phases["step"]["parameters"]
        for each in estimate_file(_write(tmp_path, model=config["model"], mesh={})).ranks
    ]
    assert sum(in_v) == full
    assert in_v[0] > in_v[1]
    assert sum(interleaved) > full  # each rank has a copy of the tied weight
    with pytest.raises(ValueError, match="schedule 'v_min' has two stages on each rank and got 1"):
        estimate_file(_write(tmp_path, **{**config, "pipeline_cuts": cuts[:1]}, pipeline_schedule="v_min"))


def test_json_numbers_without_dot_are_read(tmp_path: Path) -> None:
    """JSON writes 1e-06, which YAML 1.1 reads as text."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY_GPT2, "layer_norm_epsilon": 1e-06}))
    assert "1e-06" in (tmp_path / "config.json").read_text()
    assert estimate_file(_write(tmp_path, model="config.json", layout="tp2")).ranks


def test_unit_follows_size(tmp_path: Path) -> None:
    def text(dim: int) -> str:
        feed_forward = {"dim": dim, "hidden_dim": dim, "gated": False}
        return str(estimate_file(_write(tmp_path, model={"feed_forward": feed_forward}, mesh={})))

    assert "kB in all; mesh of one rank; kB = 1e3 bytes" in text(8) and "<0.001" not in text(8)
    assert "MB in all; mesh of one rank; MB = 1e6 bytes" in text(512)
    assert "GB in all; mesh of one rank; GB = 1e9 bytes" in text(8192)


def test_note_lists_missing_predictions(tmp_path: Path) -> None:
    llama = {**LLAMA_70B, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    pipeline = {"layout": "pp2", "pipeline_cuts": ["model.layers.1"]}
    in_v = {"layout": "pp2", "pipeline_cuts": ["model.layers.0", "model.layers.1", "model.norm"]}
    in_v |= {"pipeline_schedule": "zbv"}
    for config, reason in (
        ({"model": TINY_GPT2, "layout": "tp2"}, "not predicted for model_type 'gpt2': the figures are"),
        ({"model": {**llama, "mlp_bias": True}, "mesh": {}}, "for model_type 'llama' with mlp_bias or attention_bias:"),
        ({"model": llama, "layout": "tp2", "plan": "huggingface"}, "not predicted for the plan 'huggingface':"),
        ({"model": llama, **pipeline, "pipeline_cuts": ["model.layers.0"]}, "for a first stage without blocks:"),
        ({"model": llama, **pipeline, "pipeline_schedule": "zero_bubble"}, "for the schedule 'zero_bubble':"),
        ({"model": llama, **in_v}, "for the schedule 'zbv':"),
        (
            {"model": llama, **pipeline, "pipeline_cuts": ["model.norm"]},
            "begins at 'model.norm', which is not a block:",
        ),
    ):
        found = estimate_file(_write(tmp_path, **config))
        assert reason in found.note and "\n" not in found.note
        assert found.note in str(found).splitlines() and "rank 0" in str(found) and ": at least" in str(found)
        assert not any("saved_activations" in phase for phase in found.ranks[0].phases.values())
        with pytest.raises(ValueError, match="zero_stage is 1, which is not predicted for"):
            estimate_file(_write(tmp_path, **config, zero_stage=1))
    for plan in ("auto", {"lm_head": "replicate"}):
        assert not estimate_file(_write(tmp_path, model=llama, **pipeline, plan=plan)).note


@pytest.mark.parametrize("module", ["transformers", "weft.strategy.estimate.state"])
def test_missing_transformers_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    assert estimate_file(_write(tmp_path, model={"feed_forward": {"dim": 4, "hidden_dim": 4}}, mesh={})).ranks
    with pytest.raises(ValueError, match=r"install (torch and )?transformers, or give a configuration of llama"):
        estimate_file(_write(tmp_path, model=TINY_GPT2, mesh={}))


def test_options_change_state_of_other_models(tmp_path: Path) -> None:
    def step_state(**config: Any) -> dict[str, int]:
        [rank] = estimate_file(_write(tmp_path, model=TINY_GPT2, mesh={}, **config)).ranks
        return rank.phases["step"]

    adam, half = step_state(), step_state(precision="bf16-true")
    assert adam["gradients"] == adam["parameters"] == 2 * half["parameters"]
    assert step_state(optimizer="SGD")["optimizer_state"] == step_state(optimizer_in_backward=True)["gradients"] == 0
    assert step_state(optimizer="SGD with momentum")["optimizer_state"] == adam["parameters"]


def test_command_starts_in_every_way() -> None:
    script = Path(sys.executable).with_name("weft")
    for command in ([script], [sys.executable, "-m", "weft"], [sys.executable, "-m", "weft_command"]):
        result = run_process([*command, "--help"], timeout=100)
        assert result.returncode == 0 and result.stdout.startswith("usage: weft "), result.stderr


def test_command_prints_one_line_errors(tmp_path: Path) -> None:
    model = {"feed_forward": {"dim": 4, "hidden_dim": 4}}
    for path in (tmp_path / "nowhere.yaml", _write(tmp_path, model=model, mesh={})):
        command = [sys.executable, "-m", "weft_command", "estimate", "--config", path, "--layout", "tpauto"]
        result = run_process(command, timeout=100)
        assert result.returncode == 2
        assert result.stderr.startswith("weft estimate: ") and len(result.stderr.splitlines()) == 1

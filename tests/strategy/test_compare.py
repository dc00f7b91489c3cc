"""weft.strategy.compare: sharded and unsharded models that agree, and planted errors that it must name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft_command as command
from support.hugging_face import language_model
from support.models import FeedForward, Llama, LlamaArgs, token_batches
from support.processes import run_process
from support.ranks import on_ranks
from support.warm_starts import SPAWN
from weft.strategy import Comparison, compare
from weft.strategy.comparison import training
from weft.strategy.comparison.launch import encode_error, launch
from weft.strategy.comparison.result import ParameterDifference
from weft.strategy.comparison.subject import build_model, keep_first_layers
from weft.strategy.deferred import is_deferred

DIM = 8
NO_HEADS = {
    **{f"layers.*.attention.{name}": "column" for name in ("wq", "wk", "wv")},
    "layers.*.attention.wo": "row",
}
INNER = {"blocks.1.up": "column", "blocks.1.down": "row"}


def llama() -> nn.Module:
    return Llama(LlamaArgs())


def tokens() -> tuple[Tensor, Tensor]:
    return token_batches(1, 37)[0]


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def vectors() -> Tensor:
    return torch.randn(4, 5, DIM, generator=torch.Generator().manual_seed(1))


@on_ranks(4)
@pytest.mark.parametrize(("layout", "zero_stage"), [("cp4", 3), ("dp2,cp2", 1), ("cp2,tp2", 0)])
def test_sharded_sequences_agree(layout: str, zero_stage: int) -> None:
    found = compare(llama, tokens, layout, loss_fn=token_loss, zero_stage=zero_stage)
    assert found.agrees, str(found)


def test_sharded_sequences_with_sequence_parallel_raise() -> None:
    with pytest.raises(ValueError, match=r"^compare: got sequence_parallel=True for the layout 'cp2,tp2'"):
        compare(llama, tokens, "cp2,tp2", sequence_parallel=True)


def grouped_experts() -> nn.Module:
    """Return a model whose products of all experts at once are not in float64."""
    model: Any = language_model("mixtral")
    model.set_experts_implementation("grouped_mm")
    return model


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "zero_stage"), [("dp4,ep2", 3), ("dp4,ep2", 1), ("dp4,ep4", 0), ("dp2,ep2,tp2", 3), ("rep2,dp2,ep2", 1)]
)
def test_sharded_experts_agree(layout: str, zero_stage: int) -> None:
    model = grouped_experts()
    found = compare(model, None, layout, zero_stage=zero_stage)
    assert found.agrees and found.largest < 1e-12, str(found)
    rows = {row.parameter: row for row in found.parameters}
    assert rows["model.layers.1.mlp.experts.down_proj"].gradient is not None
    assert not any("skipped" in note for note in found.notes)
    assert model.config._experts_implementation == "grouped_mm"


@on_ranks(2)
def test_gradients_of_experts_are_compared(world_size: int) -> None:
    """Experts whose gradients are not averaged like those of other parameters would be named."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("weft.strategy.experts.layer._ScaledGradient.backward", lambda ctx, grad: (grad, None))
        found = compare(grouped_experts, None, "dp2,ep2", zero_stage=0)
    assert not found.agrees and ".experts." in found.parameters[0].parameter


def test_experts_need_a_divisor_of_data_ranks() -> None:
    with pytest.raises(ValueError, match=r"^got 2 expert-parallel ranks in 3 data-parallel ranks; pass a number that"):
        compare(grouped_experts, None, "dp3,ep2")


class Inner(nn.Module):
    """Two linear layers and an operation between them."""

    def __init__(self, between: str, hidden_dim: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, hidden_dim), nn.Linear(hidden_dim, DIM)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.between == "width":  # the shard's width if sharded
            h = h / h.shape[-1] ** 0.5
        elif self.between == "parameter":  # replicated, used by each rank for its shard
            h = h * self.scale
        elif self.between == "dropout":
            h = F.dropout(h, 0.5, self.training)
        elif self.between == "raises" and h.shape[-1] == 2:  # only on the last rank
            raise IndexError("nothing left to do")
        return self.down(h)


class Stack(nn.Module):
    def __init__(self, between: str = "", hidden_dim: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(DIM, 12), Inner(between, hidden_dim), FeedForward(DIM, 12)])
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def compare_stack(between: str, **options: Any) -> Comparison:
    return compare(lambda: Stack(between), vectors, plan=INNER, **options)


@on_ranks(2)
def test_agreement_is_reported_and_model_unchanged(rank: int, world_size: int) -> None:
    model = llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    found = compare(model, tokens(), "tp2", loss_fn=token_loss)
    assert found.agrees and found.largest < 1e-13 and found.tolerance == 1e-9
    assert found.verdict == f"agree to {found.largest:.1e} (tolerance 1e-09)"
    assert [loss.step for loss in found.losses] == [1, 2, 3]
    assert found.losses[2].unsharded < found.losses[0].unsharded
    rows = {row.parameter: row for row in found.parameters}
    assert rows.keys() == before.keys()
    assert rows["layers.1.feed_forward.w2.weight"].style == "column_row_mlp"
    assert rows["layers.1.attention.wq.weight"].axes == (("tensor_parallel", 0),)
    assert [row.largest for row in found.parameters] == sorted((row.largest for row in rows.values()), reverse=True)
    assert all(row.gradient is not None and row.weight is not None for row in found.parameters)
    for name, parameter in model.named_parameters():  # the user's model is unchanged
        assert type(parameter) is nn.Parameter and torch.equal(parameter, before[name])
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32

    data = json.loads(json.dumps(found.to_dict()))
    assert data["agrees"] and data["verdict"] == found.verdict and len(data["parameters"]) == len(rows)
    text = str(found)
    assert f"and {len(rows) - 10} more, at most " in text and text.endswith(found.verdict)


@on_ranks(2)
def test_shard_width_in_forward_is_named(world_size: int) -> None:
    found = compare_stack("width")
    assert not found.agrees
    assert found.parameters[0].parameter.startswith("blocks.1.") and found.parameters[0].gradient > 0.1
    assert (found.first_output.module, found.first_output.kind) == ("blocks.1.down", "Linear")
    assert found.verdict.startswith(f"differ: largest at {found.parameters[0].parameter}: ")
    assert "the first output to differ is that of 'blocks.1.down' (Linear)" in found.verdict


@on_ranks(2)
def test_parameter_between_shards_is_named(world_size: int) -> None:
    """The forward is correct; each rank has a partial sum of one gradient."""
    found = compare_stack("parameter", steps=1)
    assert found.losses[0].difference < 1e-13 and not found.agrees
    assert found.parameters[0].parameter == "blocks.1.scale" and found.parameters[1].largest < 1e-9
    assert found.first_output is None and "the outputs of the first forward agree" in found.verdict
    assert "replicated parameters 'blocks.1.scale' differ" in found.notes[-1] and found.notes[-1] in str(found)


@on_ranks(2)
def test_raising_forward_is_named(world_size: int) -> None:
    found = compare(llama, tokens, plan=NO_HEADS, loss_fn=token_loss)
    assert not found.agrees
    assert found.verdict.startswith(
        "differ: the sharded model raises RuntimeError in the forward of 'layers.0.attention' (Attention) at models.py:"
    )
    assert "shape '[4, 9, 4, 4]' is invalid" in found.failure
    assert [row.parameter[:19] for row in found.parameters[:4]] == ["layers.0.attention."] * 4
    assert found.parameters[0].gradient is None and found.parameters[0].style == "column"
    json.dumps(found.to_dict())


@on_ranks(2)
def test_random_differences_are_distinguished(world_size: int) -> None:
    found = compare_stack("dropout")
    assert not found.agrees and found.draws_random_numbers
    assert found.first_output.module == "blocks.1.down"
    assert found.in_eval_mode.agrees and "Random numbers are the reason: in eval mode" in found.verdict
    assert found.to_dict()["in_eval_mode"]["agrees"]
    assert compare_stack("dropout", mode="eval").agrees

    class Dropping(Stack):  # dropout of a full tensor is the same on all ranks
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    found = compare(Dropping, vectors, plan=INNER)
    assert found.agrees and found.draws_random_numbers and found.in_eval_mode is None

    class DroppingAndWrong(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    found = compare(lambda: DroppingAndWrong("width"), vectors, plan=INNER)
    assert "Random numbers are not the only reason: in eval mode, without dropout, they differ: " in found.verdict


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "zero_stage"), [("dp2,tp2", 3), ("dp2,tp2", 1), ("rep2,tp2", 0), ("rep2,dp2", 2), ("dpauto,tp2", 0)]
)
def test_every_layout_agrees(world_size: int, layout: str, zero_stage: int) -> None:
    found = compare(llama, tokens, layout, loss_fn=token_loss, zero_stage=zero_stage)
    assert found.agrees and found.largest < 1e-13
    axes = {axis for row in found.parameters for axis, _ in row.axes}
    assert axes == ({"tensor_parallel"} if "tp2" in layout else set()) | (
        {"data_parallel"} if zero_stage > 1 else set()
    )


@on_ranks(4)
def test_failing_rank_ends_other_ranks(world_size: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(training, "_GRACE_SECONDS", 0.2)
        found = compare(lambda: Stack("raises", hidden_dim=5), vectors, "dp2,tp2", plan=INNER)
    assert found.failure.startswith("the sharded model raises IndexError in the forward of 'blocks.1' (Inner)")


@on_ranks(4)
def test_indivisible_batch_raises(world_size: int) -> None:
    with pytest.raises(ValueError, match=r"the batch of 3 samples does not divide by the 4 data-parallel ranks"):
        compare(Stack(), vectors()[:3], "dp4")


@on_ranks(2)
def test_tolerance_follows_dtype(world_size: int) -> None:
    found = compare(llama, tokens, loss_fn=token_loss, dtype=torch.float32)
    assert found.agrees and found.tolerance == 1e-4 and found.largest > 1e-9
    found = compare(llama, tokens, loss_fn=token_loss, dtype=torch.float32, tolerance=1e-9)
    assert not found.agrees and found.tolerance == 1e-9


@on_ranks(2)
def test_lightning_modules_are_compared(world_size: int) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = vectors()[:2]

        def configure_model(self) -> None:
            self.model = Stack()

        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            loss = self.model(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            self.print("a Trainer would print this")
            return {"loss": loss}

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    found = compare(Module, vectors)
    assert found.agrees and found.setting.endswith("loss: training_step")
    assert found.losses[0].unsharded > 0 and found.parameters[0].parameter.startswith("model.")
    found = compare(Module, layout="dp2")  # the loss is of the output for example_input_array
    assert found.agrees and found.setting.endswith("a fixed random projection of the output")
    assert compare(Module, vectors, "dp2").agrees

    class WithoutIndex(Module):
        def training_step(self, batch: Tensor) -> Tensor:
            return super().training_step(batch, 0)["loss"]

    assert compare(WithoutIndex, vectors, "dp2").agrees

    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(ValueError, match="the Manual has manual optimization"):
        compare(Manual, vectors)


@on_ranks(2)
def test_first_layers_of_hugging_face_model_agree(world_size: int) -> None:
    found = compare(lambda: language_model("llama", num_hidden_layers=3), first_layers=1)
    assert found.agrees, found
    assert (found.tolerance, found.tolerance_note) == (1e-4, ", because the forward computes partly in float32")
    layers = {row.parameter.split(".")[2] for row in found.parameters if row.parameter.startswith("model.layers.")}
    assert layers == {"0"}
    assert "LlamaForCausalLM, the first 1 of its repeated blocks: layout tp2" in found.setting


def test_first_layers_keep_values_of_full_model() -> None:
    truncated = build_model(llama, torch.float64, 1, 0)
    torch.manual_seed(0)
    full = llama().double()
    assert len(truncated.layers) == 1  # which has its values in the full model
    assert torch.equal(truncated.layers[0].feed_forward.w1.weight, full.layers[0].feed_forward.w1.weight)
    assert torch.equal(truncated.output.weight, full.output.weight)

    layers: list[nn.Module] = []

    def large() -> nn.Module:
        model = Llama(LlamaArgs(dim=64, hidden_dim=128))
        layers.extend(model.layers)
        return model

    build_model(large, torch.float64, 1, 0)
    assert [is_deferred(layer.feed_forward.w1.weight) for layer in layers] == [False, True]

    model = nn.Module()
    model.numbered = nn.ModuleDict({str(i): FeedForward(2, 2) for i in range(12)})
    model.in_a_row = nn.Sequential(*(FeedForward(2, 2) for _ in range(3)))
    keep_first_layers(model, 2)
    assert list(model.numbered) == ["0", "1"] and len(model.in_a_row) == 2
    with pytest.raises(ValueError, match="first_layers=1 finds no repeated blocks in a Linear"):
        keep_first_layers(nn.Linear(2, 2), 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "pp2,tp2"}, "layout 'pp2,tp2' has a pipeline, which compare does not support"),
        ({"layout": "tpauto"}, "layout 'tpauto' leaves a size to the number of ranks"),
        ({"dtype": torch.int64}, "dtype is torch.int64; pass one of torch's float64, float32"),
        ({"zero_stage": 4}, "zero_stage is 4"),
        ({"mode": "test"}, "mode is 'test'"),
        ({"steps": 0}, "steps is 0"),
        ({"plan": "nothing"}, "plan"),
        ({"loss_fn": lambda model, batch: model(batch)}, "cannot be sent to the ranks"),
    ],
)
def test_invalid_options_raise_before_ranks_start(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compare(llama, tokens, **options)


def test_slow_ranks_are_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.strategy.comparison.launch.START_METHOD", SPAWN)  # imports take seconds
    with pytest.raises(TimeoutError, match=r"1 ranks did not end within 0\.01 s"):
        launch(len, (), 1, 0.01)


def test_errors_of_ranks_are_encoded() -> None:
    def raised(function: Any, *args: Any) -> Exception:
        try:
            function(*args)
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    import_error = raised(build_model, "no_such_module:name", torch.float64, None, 0)
    assert (
        encode_error(1, import_error)[0] == "invalid"
        and "'no_such_module:name' cannot be imported" in encode_error(1, import_error)[1]
    )
    kind, text = encode_error(1, raised(int, "x"))
    assert kind == "failed" and text.startswith("rank 1 raised ValueError: ") and "test_compare.py" in text


SOURCE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.w1(x)
        return self.w2(h / h.shape[-1])


def batch():
    print("from a rank")
    return torch.ones(3, 4)
"""


def test_command_prints_json_of_difference(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(SOURCE)
    (tmp_path / "plan.yaml").write_text("w1: column\nw2: row\n")
    arguments = ["--module", "own_model:Model", "--batch", "own_model:batch", "--plan", "plan.yaml", "--json"]
    result = run_process([Path(sys.executable).with_name("weft"), "compare", *arguments], timeout=300, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert not found["agrees"] and found["first_output"]["module"] == "w2"
    assert found["parameters"][0]["parameter"].startswith(("w1", "w2")) and len(found["losses"]) == 3


def test_exit_status_follows_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = ParameterDifference("weight", "column", "", "", (), 1e-12, 0.0)
    for tolerance, status in ((1e-9, 0), (1e-13, 1)):
        found = Comparison("a model", tolerance, "", (), (row,))
        monkeypatch.setattr("weft.strategy.compare", lambda *args, found=found, **options: found)
        monkeypatch.setattr(sys, "argv", ["weft", "compare", "--module", "a:b"])
        assert command.main() == status
        assert capsys.readouterr().out == f"{found}\n"
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["weft", "compare", "--module", "a:b", "--layout", "xy"])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith("weft compare: layout 'xy'")

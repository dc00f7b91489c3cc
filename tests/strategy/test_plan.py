"""weft.strategy.Plan: parsing, printing and errors."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

import weft
from support.models import Llama, LlamaArgs
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan, report

RULES = {
    "layers.*.attention.wq": {"style": "column", "heads": "n_heads"},
    "layers.*.feed_forward": "column_row_mlp",
}


def test_plan_round_trips(tmp_path: Path) -> None:
    plan = Plan(RULES)
    assert plan.to_dict() == RULES == json.loads(plan.to_json())
    assert Plan.from_yaml(plan.to_yaml()).to_dict() == RULES
    assert Plan.from_json(plan.to_json()).to_dict() == RULES
    assert Plan(plan.to_yaml()).to_dict() == Plan(plan.to_json()).to_dict() == RULES
    for name, text in (("plan.yaml", plan.to_yaml()), ("plan.json", plan.to_json())):
        (tmp_path / name).write_text(text)
        assert Plan(tmp_path / name).to_dict() == Plan(str(tmp_path / name)).to_dict() == RULES
    assert Plan(Plan(RULES)).to_dict() == RULES


KINDS = r"pass 'auto', 'huggingface', the path of a YAML or JSON file, .* as .* text, or a callable by its dotted name"


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"a": "colum"}, ValueError, "unknown style 'colum'.*nearest is 'column'"),
        ({"a..b": "column"}, ValueError, "a..b"),
        ({1: "column"}, ValueError, "pattern 1 is no text"),
        ({"a": ["column"]}, ValueError, "pattern 'a' has the value"),
        (
            {"a": {"style": "column", "head": "n"}},
            ValueError,
            "the option 'head', which is close to 'heads'",
        ),
        ({"a": {"style": "column", "heads": 3}}, ValueError, "pattern 'a' has the value"),
        ("nowhere.yaml", ValueError, "there is no file 'nowhere.yaml'"),
        ("a: row  # as in row.yaml\n- b", ValueError, "is not YAML"),
        ("- column: row", ValueError, "pass a mapping"),
        ("a: [", ValueError, "is not YAML"),
        ("# a: row", ValueError, "the text is empty"),
        ("", ValueError, f"got ''; {KINDS}"),
        ("- column", ValueError, f"got '- column'; {KINDS}"),
        ("automatic", ValueError, f"got 'automatic', which is close to 'auto'; {KINDS}"),
        ("nonsense", ValueError, f"^plan: got 'nonsense'; {KINDS}"),
        ("a row\nb column", ValueError, KINDS),
        ("support.models.nothing", ValueError, f"'support.models' has no 'nothing'; {KINDS}"),
        ("support.nothing.llama", ValueError, f"'support' has no 'nothing'; {KINDS}"),
        ("not_there.plans.llama", ValueError, f"no module 'not_there' for 'not_there.plans.llama'; {KINDS}"),
        ("math.pi", ValueError, f"'math.pi' is a float, which cannot be called; {KINDS}"),
        ("a: row\nb: row\na: column", ValueError, "the text gives the pattern 'a' twice"),
        (3, TypeError, "got a int"),
    ],
)
def test_invalid_plans_raise(rules: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Plan(rules)
    assert "\n" not in str(caught.value)


def test_torch_styles_are_translated() -> None:
    plan = Plan(
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "w1": ColwiseParallel(),
            "w2": RowwiseParallel(),
            "norm": "replicate",
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
    )
    expected = ("row_split_input", "column", "row", "replicate", "column_gather_output")
    assert tuple(plan.to_dict().values()) == expected
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "w1": nn.Linear(4, 4)})
    styles = Plan(lambda name, module: RowwiseParallel(input_layouts=Replicate()) if name == "embedding" else None)
    assert styles.assign(model, 2).styles["embedding"].style == "vocab_embedding"


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (SequenceParallel(sequence_dim=0), "'a' has a SequenceParallel, for which weft has no style"),
        (PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()), "'a' has a PrepareModuleInput"),
        (RowwiseParallel(output_layouts=Shard(1)), "'a' has a RowwiseParallel from .* for which weft has no style"),
        (ColwiseParallel(use_local_output=False), "'a' has a ColwiseParallel with use_local_output=False"),
    ],
)
def test_unsupported_torch_styles_raise(style: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Plan({"a": style})
    assert "\n" not in str(caught.value)


def test_strings_are_read_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "weft_test_plans.py").write_text(
        "class Llama:\n    @staticmethod\n    def rules(name, module):\n        return 'row' if name == '0' else None\n"
    )
    (tmp_path / "auto").write_text("a: row")
    (tmp_path / "weft_test_plans.json").write_text('{"b": "row"}')
    assert Plan("auto").is_auto and Plan(" auto\n").is_auto
    assert Plan("weft_test_plans.json").to_dict() == {"b": "row"}
    assert Plan("a: row  # see weft_test_plans.json").to_dict() == {"a": "row"}
    assert Plan("{}").to_dict() == {}
    by_name = Plan("weft_test_plans.Llama.rules")
    assert by_name.rules_for(nn.Sequential(nn.Linear(2, 2))) == Plan("'0': row").rules_for(nn.Identity())
    assert by_name.key() == Plan("weft_test_plans.Llama.rules").key()
    with pytest.raises(ValueError, match="the rules of a callable depend on the model"):
        by_name.to_dict()


def test_errors_of_plan_modules_propagate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "weft_test_broken.py").write_text("import weft_test_not_there")
    with pytest.raises(ModuleNotFoundError, match="weft_test_not_there"):
        Plan("weft_test_broken.llama")


def test_auto_has_no_rules() -> None:
    assert str(Plan("auto")) == "auto"
    for read in (Plan("auto").to_dict, Plan("auto").to_yaml, Plan("auto").to_json):
        with pytest.raises(ValueError, match="'auto' depend on the model"):
            read()
    with pytest.raises(ValueError, match="not applied yet"):
        Plan("auto").report()


def by_class(name: str, module: nn.Module) -> str | None:
    return "column_row_mlp" if type(module).__name__ == "FeedForward" else None


@on_ranks(2)
def test_callable_plan_chooses_styles(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    plan = Plan(by_class)
    model = weft.parallelize(Llama(LlamaArgs()), mesh, plan)
    sharded = {row.parameter for row in plan.report().rows if row.style == "column_row_mlp"}
    assert sharded == {f"layers.{i}.feed_forward.{w}.weight" for i in (0, 1) for w in ("w1", "w2", "w3")}
    weft.parallelize(model, mesh, by_class)


@on_ranks(2)
def test_report_table_lists_shards(world_size: int) -> None:
    others = {
        f"layers.*.attention.{name}": style for name, style in (("wk", "column"), ("wv", "column"), ("wo", "row"))
    }
    plan = Plan(RULES | others)
    model = weft.parallelize(Llama(LlamaArgs(tie_head=True)), tensor_parallel(world_size), plan)
    assert plan.report() == report(model)
    lines = str(plan.report()).splitlines()
    assert lines[0].split() == ["parameter", "rule", "style", "local", "shape", "sharded", "over", "bytes", "note"]
    line = next(line for line in lines if line.startswith("layers.0.feed_forward.w1.weight"))
    name, pattern = "layers.0.feed_forward.w1.weight", "layers.*.feed_forward"
    cells = ["column_row_mlp", "19x16", "tensor_parallel:0", "1,216", "silu,", "gated"]
    assert line.split() == [name, pattern, *cells]
    total = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert plan.report().total_bytes == total
    assert next(line for line in lines if line.startswith("total")).split()[-1] == f"{total:,}"
    assert "layers.0.attention.n_heads = 2 on this rank" in lines


@on_ranks(2)
def test_report_of_deleted_model_raises(world_size: int) -> None:
    plan = Plan("auto")
    weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), plan)
    gc.collect()
    with pytest.raises(ValueError, match="was applied to a model that is gone"):
        plan.report()


@on_ranks(4)
def test_report_as_json_lists_axes_and_rules(world_size: int) -> None:
    """The report lists the axes that shard each parameter, also after fully_shard, and the parameters of each rule."""
    names = ("data_parallel", "tensor_parallel")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    plan = Plan({"layers.*.attention.wo": "replicate", "layers.1.feed_forward": "column_row_mlp"})
    model = weft.parallelize(Llama(LlamaArgs()), mesh, plan)
    fully_shard(model, mesh=mesh["data_parallel"])
    data = json.loads(plan.report().to_json())
    assert data == plan.report().to_dict()
    rows = {row["parameter"]: row for row in data["parameters"]}
    assert rows["layers.1.feed_forward.w2.weight"]["axes"] == {"data_parallel": 0, "tensor_parallel": 1}
    assert rows["layers.1.feed_forward.w2.weight"]["local_shape"] == [8, 19]
    assert rows["norm.weight"] | {"axes": {"data_parallel": 0}, "rule": "", "style": "replicate"} == rows["norm.weight"]
    assert data["rules"] == {
        "layers.*.attention.wo": [f"layers.{i}.attention.wo.weight" for i in range(2)],
        "layers.1.feed_forward": [f"layers.1.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")],
    }
    assert data["total_bytes"] == sum(p.to_local().nbytes for p in model.parameters())


@on_ranks(2)
def test_report_of_wrapped_model_equals_that_of_model(world_size: int) -> None:
    """For a wrapper such as Fabric's, the report has the names and notes of the parallelized model."""
    model = weft.parallelize(Llama(LlamaArgs()), tensor_parallel(world_size), "auto")
    wrapper = nn.Module()
    wrapper._forward_module = model
    assert str(report(wrapper)) == str(report(model))
    assert "n_heads" in str(report(wrapper))
    wrapper.scale = nn.Linear(1, 1)
    assert any(row.parameter == "scale.weight" for row in report(wrapper).rows)

"""Plans shard linear layers with PEFT's LoRA like the layers without, and adapters are read and saved as PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ops.collectives.profiled import collectives_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from support import pretrained
from support.parity import full
from support.ranks import on_ranks
from weft.strategy import deferred_init
from weft.strategy.deferred.files import FileTensor
from weft.strategy.recognition.adapters import hidden_adapters

peft = pytest.importorskip("peft")

RANK = 6  # of the adapters
BLOCKS = "base_model.model.model.layers.*"
BLOCK = BLOCKS.replace("*", "0")


def _config(**changes: Any) -> Any:
    options = {"r": RANK, "lora_alpha": 9, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    return peft.LoraConfig(**options)


def _adapted(family: str, *configs: Any, seed: int = 5) -> Any:
    """Return a model with random adapters named "default", "adapter1", ...; all are active."""
    model = peft.get_peft_model(pretrained.build(family), configs[0])
    names = ["default", *(f"adapter{number}" for number in range(1, len(configs)))]
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    model.base_model.set_adapter(names)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # those of B are zeros
                parameter.normal_(0, 0.1, generator=generator)
    return model.train()


def _mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))


def _assert_equal_step(sharded: Any, reference: Any) -> None:
    """Compare logits, and gradients of the trained parameters; the others have none."""
    logits = []
    for model in (reference, sharded):
        torch.manual_seed(3)
        logits.append(model(input_ids=pretrained.tokens()).logits)
        pretrained.loss_of(logits[-1], 1).backward()
    torch.testing.assert_close(logits[1].detach(), logits[0].detach(), rtol=0, atol=1e-12)
    parameters = dict(sharded.named_parameters())
    assert parameters.keys() == dict(reference.named_parameters()).keys()
    for name, expected in reference.named_parameters():
        assert parameters[name].requires_grad == expected.requires_grad
        assert (parameters[name].grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(full(parameters[name].grad), expected.grad, rtol=0, atol=1e-12, msg=name)


@on_ranks(2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])  # nn.Linear by heads; Conv1D; gathered activations
def test_step_matches_unsharded(rank: int, world_size: int, family: str, sequence_parallel: bool) -> None:
    """With dropout inside the adapters; the 4 heads do not divide by 3 ranks, so attention is gathered there."""
    sharded, reference = (_adapted(family, _config(lora_dropout=0.3)) for _ in range(2))
    weft.parallelize(sharded, _mesh(world_size), weft.strategy.Plan("auto", sequence_parallel=sequence_parallel))
    _assert_equal_step(sharded, reference)


@on_ranks(2)
@pytest.mark.parametrize("style", ["sequence_parallel", "no style"])
def test_adapters_of_unsharded_layers_in_a_sequence_region(rank: int, world_size: int, style: str) -> None:
    """They get a shard of the tokens, so their gradients are sums: in a named MLP, and in a linear layer of a block."""
    models = [_adapted("llama", _config(target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])) for _ in range(2)]
    plan = {f"{BLOCKS}.self_attn": "attention"}
    if style == "sequence_parallel":
        plan[f"{BLOCKS}.mlp"] = style
    else:
        for model in models:
            for block in model.base_model.model.model.layers:
                block.mlp = block.mlp.up_proj  # [hidden, ffn] would not fit the block
                block.mlp.base_layer = nn.Linear(pretrained.HIDDEN, pretrained.HIDDEN, dtype=torch.float64)
                block.mlp.lora_B["default"] = nn.Linear(RANK, pretrained.HIDDEN, bias=False, dtype=torch.float64)
                generator = torch.Generator().manual_seed(4)
                for parameter in (*block.mlp.base_layer.parameters(), *block.mlp.lora_B.parameters()):
                    parameter.data.normal_(0, 0.1, generator=generator)
                block.mlp.base_layer.requires_grad_(False)
    weft.parallelize(models[1], _mesh(world_size), weft.strategy.Plan(plan, sequence_parallel=True))
    _assert_equal_step(models[1], models[0])


@on_ranks(2)
def test_adapters_are_sharded_to_match(rank: int, world_size: int) -> None:
    model = _adapted("llama", _config())
    weft.parallelize(model, _mesh(world_size), "auto")
    shapes = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if name.startswith(BLOCK)}
    hidden, ffn = pretrained.HIDDEN, pretrained.FFN
    for layer in ("q_proj", "v_proj"):
        out = hidden if layer == "q_proj" else hidden // 2
        assert shapes[f"{BLOCK}.self_attn.{layer}.base_layer.weight"] == (out // 2, hidden)
        assert shapes[f"{BLOCK}.self_attn.{layer}.lora_A.default.weight"] == (RANK, hidden)
        assert shapes[f"{BLOCK}.self_attn.{layer}.lora_B.default.weight"] == (out // 2, RANK)
    assert shapes[f"{BLOCK}.mlp.down_proj.base_layer.weight"] == (hidden, ffn // 2)
    assert shapes[f"{BLOCK}.mlp.down_proj.lora_A.default.weight"] == (RANK, ffn // 2)
    assert shapes[f"{BLOCK}.mlp.down_proj.lora_B.default.weight"] == (hidden, RANK)
    assert "adapter of" in str(weft.strategy.report(model))


@on_ranks(2)
def test_adapters_add_small_all_reduces(rank: int, world_size: int) -> None:
    """One for each adapter, of [tokens, RANK] elements: the output of a row layer's A, the gradient of a column's B."""
    model = _adapted("llama", _config())
    weft.parallelize(model, _mesh(world_size), "auto")
    num_column, num_row = 5, 2  # layers of a block
    embedding, head = 1, 1
    forward = embedding + pretrained.LAYERS * 2 * num_row  # the base layer's, and the adapter's
    # The first block's input has no gradient, so its query, key and value layers only have the adapters'.
    backward = head + pretrained.LAYERS * 2 * num_column - 3
    expected = {"all_reduce": forward + backward, "all_gather_into_tensor": head}
    collectives_of(lambda: model(input_ids=pretrained.tokens()).logits.sum().backward(), expected)


VARIANTS: dict[str, tuple[str, list[dict[str, Any]]]] = {  # (family, configurations)
    "biases": ("gpt_neox", [{"bias": "lora_only"}]),
    "full head": ("llama", [{"modules_to_save": ["lm_head"]}]),
    "embedding": ("llama", [{"target_modules": ["embed_tokens", "q_proj", "o_proj"]}]),
    "tied head": ("qwen2", [{"target_modules": ["q_proj", "lm_head"]}]),
    "two adapters": ("llama", [{}, {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}]),
    "DoRA": ("llama", [{"use_dora": True}]),  # reads weights, which are gathered
}


@on_ranks(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_unsharded(rank: int, world_size: int, tmp_path: Path, variant: str) -> None:
    """Files too: those of `save_pretrained` equal those that PEFT writes on one device."""
    family, options = VARIANTS[variant]
    sharded, reference = (_adapted(family, *(_config(**each) for each in options)) for _ in range(2))
    weft.parallelize(sharded, _mesh(world_size), "auto")
    _assert_equal_step(sharded, reference)
    weft.save_pretrained(sharded, tmp_path / "ours")
    reference.save_pretrained(tmp_path / f"theirs{rank}")
    for folder in [".", *list(reference.peft_config)[1:]]:
        ours, theirs = tmp_path / "ours" / folder, tmp_path / f"theirs{rank}" / folder
        actual, expected = pretrained.stored(ours), pretrained.stored(theirs)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())
        assert pretrained.adapter_config(ours) == pretrained.adapter_config(theirs)


@on_ranks(2)
@pytest.mark.parametrize(
    "plan",
    [
        "huggingface",
        {
            f"{BLOCK[:-1]}*.self_attn": "attention",
            f"{BLOCK[:-1]}*.mlp": "column_row_mlp",
            "base_model.model.lm_head": "vocab_head",
        },
    ],
    ids=["huggingface", "rules"],
)
def test_plans_name_layers_without_adapters(rank: int, world_size: int, plan: Any) -> None:
    config = _config(target_modules=["q_proj", "down_proj", "lm_head"])
    sharded, reference = (_adapted("llama", config) for _ in range(2))
    weft.parallelize(sharded, _mesh(world_size), plan)
    head = "base_model.model.lm_head"
    for name in (
        *(f"{BLOCK}.self_attn.q_proj.base_layer", f"{BLOCK}.self_attn.q_proj.lora_B.default"),
        *(f"{BLOCK}.mlp.down_proj.base_layer", f"{BLOCK}.mlp.down_proj.lora_A.default"),
        *(f"{head}.base_layer", f"{head}.lora_B.default"),
    ):
        weight = sharded.get_parameter(f"{name}.weight")
        assert weight.to_local().numel() * world_size == weight.numel(), name
    _assert_equal_step(sharded, reference)


@on_ranks(2)
@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=["DoRA", "full head"])
def test_hugging_face_plan_leaves_other_wrappers_replicated(
    rank: int, world_size: int, changes: dict[str, Any]
) -> None:
    sharded, reference = (_adapted("llama", _config(**changes)) for _ in range(2))
    weft.parallelize(sharded, _mesh(world_size), "huggingface")
    assert "left replicated: PEFT has put a " in str(weft.strategy.report(sharded))
    _assert_equal_step(sharded, reference)


@on_ranks(2)
def test_merged_adapters_match_unsharded(rank: int, world_size: int, tmp_path: Path) -> None:
    sharded, reference = (_adapted("llama", _config()) for _ in range(2))
    weft.parallelize(sharded, _mesh(world_size), "auto")
    models = [each.merge_and_unload() for each in (sharded, reference)]
    weft.save_pretrained(models[0], tmp_path / "llama")
    loaded = pretrained.load(tmp_path / "llama").state_dict()
    for name, value in models[1].state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-14)
    for each in models:
        each.requires_grad_(True)
    _assert_equal_step(*models)


@on_ranks(2)
def test_each_rank_reads_shards_of_adapters(rank: int, world_size: int, tmp_path: Path) -> None:
    if rank == 0:
        pretrained.build("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "llama")
        adapted = peft.get_peft_model(pretrained.load(tmp_path / "llama"), _config(r=64))
        adapted.save_pretrained(tmp_path / "adapter")
    dist.barrier()

    def load() -> Any:
        base = pretrained.load(tmp_path / "llama")
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)

    before = FileTensor.num_bytes_read
    with deferred_init():
        model = load()
    at_once = FileTensor.num_bytes_read - before  # tensors below 16 KiB
    weft.parallelize(model, _mesh(world_size), "auto")
    held = sum(p.to_local().nbytes for p in model.parameters())
    assert FileTensor.num_bytes_read - before <= held + at_once < sum(p.numel() * 8 for p in model.parameters())
    _assert_equal_step(model, load())


def test_model_is_unchanged_after_an_error() -> None:
    model = _adapted("llama", _config())
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(RuntimeError, match="inside"), hidden_adapters(model):
        assert not any("lora_" in name for name, _ in model.named_modules())
        raise RuntimeError("inside")
    assert names == [name for name, _ in model.named_modules()]
    assert not any(key.startswith("_weft") for module in model.modules() for key in module.__dict__)


@on_ranks(2)
def test_model_with_adapters_on_one_rank_raises_error(rank: int, world_size: int, tmp_path: Path) -> None:
    model = _adapted("llama", _config()) if rank == 1 else nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapters on the ranks \[1\] alone; place pipeline cuts inside of it"):
        weft.save_pretrained(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@on_ranks(1)
def test_computed_adapters_raise_error(rank: int, world_size: int, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(pretrained.build("llama"), config)
    with pytest.raises(
        ValueError, match=r"an adapter of the type PROMPT_TUNING, whose weights PEFT computes; use LoRA"
    ):
        weft.save_pretrained(model, tmp_path / "saved")


@on_ranks(1)
def test_adapters_outside_of_a_peft_model_raise_error(rank: int, world_size: int, tmp_path: Path) -> None:
    model = _adapted("llama", _config())
    with pytest.raises(ValueError, match=r"got 'model.layers.0.self_attn.q_proj', a layer with adapters, in a model"):
        weft.save_pretrained(model.get_base_model(), tmp_path / "saved")
    both = nn.ModuleList([model, _adapted("llama", _config())])
    with pytest.raises(ValueError, match=r"several models with adapters \('0', '1'\); pass one of them"):
        weft.save_pretrained(both, tmp_path / "saved")
    assert not list(tmp_path.iterdir())

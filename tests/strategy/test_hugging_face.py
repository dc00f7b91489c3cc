"""Models of transformers: with plan="auto" and with their own plans they train as on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from support.hugging_face import CONFIGS, VOCAB, language_model
from support.models import Llama, LlamaArgs
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks
from weft.strategy import Plan, report
from weft.strategy.planning.plan_text import HUGGING_FACE_STYLES

ROUNDING_TOLERANCE = 1e-5  # the models' own code computes some values in float32: logits, norms
WITH_PLANS = sorted(set(CONFIGS) - {"gpt2", "opt"})
# The styles that shard a matrix of a block.
SHARDING_STYLES = {"column", "row", "column_row_mlp", "column_gather_output", "row_split_input"}


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (2, 9), generator=generator) for _ in range(count)]


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss that the model itself computes, with some tokens masked."""
    labels = tokens.clone()
    labels[:, :2] = -100
    return model(input_ids=tokens, labels=labels).loss


@on_ranks(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_auto_matches_one_device(world_size: int, family: str) -> None:
    torch.manual_seed(0)
    model = assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), "auto"),
        language_model(family),
        causal_loss,
        batches(),
        "SGD",
        tolerance=ROUNDING_TOLERANCE,
    )
    replicated = [
        row.parameter
        for row in report(model).rows
        if row.style not in SHARDING_STYLES
        and len(row.local_shape) == 2
        and (".layers." in row.parameter or ".h." in row.parameter)
    ]
    assert replicated == [], "every matrix of every block must be sharded"
    weft.strategy.check_replicated_gradients(model)


@on_ranks(2)
@pytest.mark.parametrize("family", WITH_PLANS)
def test_hugging_face_plans_match_one_device(world_size: int, family: str) -> None:
    torch.manual_seed(0)
    model = assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), "huggingface"),
        language_model(family),
        causal_loss,
        batches(),
        "SGD",
        tolerance=ROUNDING_TOLERANCE,
    )
    sharded = {row.parameter: row for row in report(model).rows if row.axes}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(sharded), "tied or not"
    gate = "model.layers.0.mlp.gate_proj.weight"
    if gate in sharded:
        assert (sharded[gate].style, sharded[gate].rule) == ("column_row_mlp", "model.layers.*.mlp.gate_proj")


@on_ranks(2)
def test_padding_row_has_no_gradient(world_size: int) -> None:
    torch.manual_seed(0)
    model = assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), "huggingface"),
        language_model("llama", pad_token_id=40, tie_word_embeddings=False),
        causal_loss,
        [tokens.masked_fill(tokens < 20, 40) for tokens in batches()],
        "SGD",
        tolerance=ROUNDING_TOLERANCE,
    )
    causal_loss(model, torch.tensor([[40, 39, 38, 40]])).backward()
    grad = model.model.embed_tokens.weight.grad.full_tensor()
    assert not grad[40].any() and grad[39].any()


@on_ranks(2)
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "phi3"])
def test_sequence_parallel_matches_one_device(world_size: int, family: str) -> None:
    torch.manual_seed(0)
    assert_same_training(
        lambda m: weft.parallelize(m, tensor_parallel(world_size), Plan("auto", sequence_parallel=True)),
        language_model(family),
        causal_loss,
        batches(),
        "SGD",
        tolerance=ROUNDING_TOLERANCE,
    )


class Inside(nn.Module):
    """A model next to another layer, as in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = language_model("llama")
        self.scale = nn.Linear(1, 1)


@on_ranks(2)
def test_plan_of_inner_model_is_found(world_size: int) -> None:
    model = weft.parallelize(Inside(), tensor_parallel(world_size), "huggingface")
    sharded = [row for row in report(model).rows if row.axes]
    assert len(sharded) == 2 + 2 * 7
    assert all(row.parameter.startswith("net.") for row in sharded)
    assert str(Plan("huggingface")) == "huggingface"


@on_ranks(2)
def test_plan_of_config_is_used(world_size: int) -> None:
    """The config has the plan, as in transformers 4.49; one rule is for a module that the model lacks."""
    model = nn.Module()
    model.model, model.base_model_prefix = Llama(LlamaArgs()), "model"
    names = {"wq": "colwise", "wk": "colwise", "wv": "colwise", "wo": "rowwise", "q_norm": "sequence_parallel_norm"}
    plan = {f"layers.*.attention.{name}": style for name, style in names.items() if name != "q_norm"}
    plan |= {"output": "colwise_rep", "vision.proj": "colwise"}
    model.config = SimpleNamespace(base_model_tp_plan=plan)
    weft.parallelize(model, tensor_parallel(world_size), "huggingface")
    styles = {row.parameter: row.style for row in report(model).rows}
    assert styles["model.output.weight"] == "column_gather_output"
    assert styles["model.layers.0.attention.wq.weight"] == "column"
    assert model.model.layers[0].attention.n_heads == 4, "n_heads must be this rank's only in the forward"
    assert "model.layers.0.attention.n_heads = 2 on this rank, inside its module's forward" in report(model).notes
    assert "model.vision.proj: this pattern of Hugging Face's plan matches no module" in report(model).notes


@on_ranks(4)
def test_unsupported_plans_raise(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    with pytest.raises(
        ValueError, match=r"shards 'model.layers.0.self_attn' by heads, but its 2 key heads do not divide"
    ):
        weft.parallelize(language_model("llama"), mesh, "huggingface")
    with pytest.raises(ValueError, match=r"finds no model with a plan of its own .* in a Llama"):
        weft.parallelize(Llama(LlamaArgs()), mesh, "huggingface")
    model = language_model("llama")
    model._tp_plan = {"model.layers.*.mlp.experts": "grouped_gemm"}
    with pytest.raises(
        ValueError, match=r"gives 'model.layers.*.mlp.experts' the style 'grouped_gemm', which weft does"
    ):
        weft.parallelize(model, mesh, "huggingface")
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_hugging_face_styles_are_translated() -> None:
    plan: dict[str, Any] = {f"layers.{name}": name for name in HUGGING_FACE_STYLES}
    assert Plan(plan).to_dict() == {f"layers.{name}": style for name, style in HUGGING_FACE_STYLES.items()}

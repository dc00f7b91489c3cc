"""plan="auto": what it recognises, and what it leaves alone with which reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.models import Attention, FeedForward, Llama, LlamaArgs, RMSNorm
from weft.strategy.assignments import Assignments
from weft.strategy.auto import assign_auto


def styles(result: Assignments) -> dict[str, str]:
    return {name: assignment.style for name, assignment in result.styles.items()}


class Hf(nn.Module):
    """A block with the names of Hugging Face's Llama; its attention counts heads by -1 views."""

    def __init__(self, num_heads: int = 4, head_dim: int | None = 4, output: str = "o_proj") -> None:
        super().__init__()
        self.self_attn = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", output):
            self.self_attn.add_module(name, nn.Linear(4 * num_heads, 4 * num_heads))
        if head_dim is not None:
            self.self_attn.head_dim = head_dim
        self.mlp = Swiglu(4 * num_heads)


class Swiglu(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.down_proj = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class EncoderLike(nn.Module):
    """Pre-norm layer with linear1/linear2 of its own; `between` puts a parameter among the hidden units."""

    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear1, self.linear2 = nn.Linear(8, 24), nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(1)) if between else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear1(self.norm(x)).relu()
        return x + self.linear2(h if self.scale is None else h * self.scale)


@pytest.mark.parametrize("output", ["o_proj", "out_proj", "dense"])
def test_hugging_face_names(output: str) -> None:
    result = assign_auto(Hf(output=output), 2)
    assert styles(result) == {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        f"self_attn.{output}": "row",
        "mlp": "column_row_mlp",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    }
    assert result.heads == {} and result.notes == []


@pytest.mark.parametrize(
    ("model", "tp_size", "reason"),
    [
        (Hf(num_heads=3), 2, "its 3 query heads do not divide by 2"),
        (Hf(head_dim=None), 2, "no int attribute that counts its heads"),
        (Llama(LlamaArgs(n_kv_heads=2)), 4, "n_kv_heads=2 does not divide by 4"),
    ],
    ids=["three heads", "uncounted", "few key heads"],
)
def test_attention_that_does_not_divide_stays_whole(model: nn.Module, tp_size: int, reason: str) -> None:
    result = assign_auto(model, tp_size)
    assert any(reason in note for note in result.notes), result.notes
    assert not any("attention" in name or "attn" in name for name in result.styles)
    assert "column_row_mlp" in styles(result).values()


def test_norms_of_heads_sum_their_gradients() -> None:
    model = nn.ModuleDict({"attention": Attention(LlamaArgs()), "mlp": Swiglu(8)})
    model["attention"].q_norm = RMSNorm(4, torch.float32)
    result = assign_auto(model, 2)
    assert styles(result)["attention.wq"] == "column"
    assert styles(result)["attention.q_norm"] == "replicate_sum_gradients"


def test_attention_with_a_norm_over_all_heads_stays_whole() -> None:
    model = nn.ModuleDict({"attention": Attention(LlamaArgs()), "mlp": Swiglu(8)})
    model["attention"].q_norm = RMSNorm(16, torch.float32)
    result = assign_auto(model, 2)
    assert "attention.wq" not in result.styles
    assert any("more parameters than its projections: q_norm.weight" in note for note in result.notes)


def test_shared_key_heads_are_divided_too() -> None:
    result = assign_auto(Llama(LlamaArgs(n_heads=4, n_kv_heads=2)), 2)
    assert result.heads["layers.0.attention", "n_heads"] == 2
    assert result.heads["layers.0.attention", "n_kv_heads"] == 1


def test_encoder_like_layers_are_split_where_that_is_right() -> None:
    result = assign_auto(nn.ModuleDict({"good": EncoderLike(), "bad": EncoderLike(between=True)}), 2)
    assert styles(result) == {"good.linear1": "column", "good.linear2": "row"}
    assert any("'bad': left replicated: the parameter 'scale' is used between" in note for note in result.notes)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (LlamaArgs(), None),
        (LlamaArgs(tie_head=True), None),
        (LlamaArgs(head_bias=True), None),
        (LlamaArgs(vocab_size=7), "7 rows are too few for 2 ranks"),
    ],
    ids=["separate head", "tied head", "head with a bias", "few rows"],
)
def test_embeddings_and_output_layers(args: LlamaArgs, reason: str | None) -> None:
    found = assign_auto(Llama(args), 2)
    assert styles(found).get("tok_embeddings") == (None if reason else "vocab_embedding")
    assert styles(found).get("output") == (None if reason else "column_gather_output")
    assert reason is None or any(reason in note for note in found.notes)


class Several(nn.Module):
    """An encoder and a decoder with one table and one output layer, and what else has as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.other = nn.Embedding(16, 8), nn.Embedding(16, 8), nn.Embedding(12, 8)
        self.head, self.second = nn.Linear(8, 16, bias=False), nn.Linear(8, 16)
        self.decoder.weight = self.head.weight = self.encoder.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(2))
        self.attention, self.mlp = nn.MultiheadAttention(16, 2), FeedForward(8, 20)


def cut(model: nn.Module) -> dict[str, str]:
    return {name: style for name, style in styles(assign_auto(model, 2)).items() if not name.startswith("mlp")}


def test_tables_and_layers_of_one_weight() -> None:
    tables = dict.fromkeys(("encoder", "decoder"), "vocab_embedding")
    assert cut(Several()) == {**tables, **dict.fromkeys(("head", "second"), "column_gather_output")}
    found = assign_auto(Several(), 2)
    assert any("'other': left replicated: no output layer of 12 features" in note for note in found.notes)


def test_tables_whose_weight_others_have_stay_whole() -> None:
    model = Several()
    model.second.register_parameter("table", model.encoder.weight)  # of another name
    assert cut(model) == {}
    model = Several()
    model.decoder = nn.Embedding(16, 8, max_norm=1.0)
    model.decoder.weight = model.encoder.weight
    assert cut(model) == {}
    assert any("tied to that of 'decoder', which cannot be cut" in note for note in assign_auto(model, 2).notes)


def test_an_output_layer_whose_bias_others_have_stays_whole() -> None:
    """As the head of BERT, whose bias is tied to a parameter beside the layer; no two of one are cut differently."""
    model = Several()
    model.register_parameter("bias", model.second.bias)
    assert "second" not in cut(model)
    weightless = nn.ModuleDict({"table": nn.Embedding(16, 8), "head": nn.Linear(8, 16), "mlp": FeedForward(8, 20)})
    weightless.register_parameter("bias", weightless["head"].bias)
    assert cut(weightless) == {}


def test_an_output_layer_follows_the_table_that_it_is_tied_to() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(16, 8), "whole": nn.Embedding(16, 8, max_norm=1.0)})
    model["head"], model["tied"], model["mlp"] = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), FeedForward(8, 20)
    model["tied"].weight = model["whole"].weight
    assert cut(model) == {"table": "vocab_embedding", "head": "column_gather_output"}

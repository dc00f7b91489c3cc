"""The modules that plan="auto" recognizes, and those that it leaves unsharded, with its reasons."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from support.models import FeedForward, Llama, LlamaArgs, RMSNorm
from support.parity import tensor_parallel
from support.ranks import on_ranks
from weft.strategy.planning.auto import assign_auto
from weft.strategy.recognition.assignments import Assignments
from weft.strategy.verification.dataflow import Group
from weft.strategy.verification.heads import verdict_on
from weft.strategy.verification.rehearsal import Call


def styles(result: Assignments) -> dict[str, str]:
    return {name: assignment.style for name, assignment in result.styles.items()}


class NamedAttention(nn.Module):
    """Attention with arbitrary names; its views use -1 or an attribute as the number of heads; norms as in Qwen3."""

    def __init__(
        self,
        num_heads: int = 4,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        counted_by: str | None = None,
        norm: int = 0,
    ) -> None:
        super().__init__()
        self.names, self.counted_by = names, counted_by
        for name in names:
            self.add_module(name, nn.Linear(4 * num_heads, 4 * num_heads))
        if counted_by is not None:
            setattr(self, counted_by, num_heads)
        self.config = {"heads": num_heads}
        self.q_norm = RMSNorm(norm, torch.float32) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        *layers, output = (getattr(self, name) for name in self.names)
        q, k, v = (layer(x) for layer in layers)
        q = self.q_norm(q) if self.q_norm is not None and self.q_norm.weight.numel() > 4 else q
        counts = getattr(self, self.counted_by) if self.counted_by is not None else -1
        q, k, v = (each.view(*x.shape[:2], counts, 4).transpose(1, 2) for each in (q, k, v))
        q = self.q_norm(q) if self.q_norm is not None and self.q_norm.weight.numel() == 4 else q
        return output(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    """A block of a NamedAttention and an MLP."""

    def __init__(self, num_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.self_attn = NamedAttention(num_heads, **options)
        self.mlp = Swiglu(4 * num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.self_attn(x))


class FromConfig(NamedAttention):
    """Reads its number of heads from its config, where weft cannot divide it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.config["heads"], -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


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
    """Pre-norm layer with its own linear1 and linear2; `between` multiplies the hidden units by a parameter."""

    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear1, self.linear2 = nn.Linear(8, 24), nn.Linear(24, 8)
        self.scale = nn.Parameter(torch.ones(1)) if between else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear1(self.norm(x)).relu()
        return x + self.linear2(h if self.scale is None else h * self.scale)


@pytest.mark.parametrize(
    "names",
    [("q_proj", "k_proj", "v_proj", "o_proj"), ("query", "key", "value", "proj"), ("a", "b", "c", "d")],
    ids=["hugging face", "others", "any"],
)
@pytest.mark.parametrize("counted_by", [None, "num_heads", "h", "unknown"])
def test_attention_with_any_names_is_sharded(names: tuple[str, ...], counted_by: str | None) -> None:
    result = assign_auto(AttentionBlock(names=names, counted_by=counted_by), 2)
    *columns, row = (f"self_attn.{name}" for name in names)
    assert styles(result) == {
        **dict.fromkeys(columns, "column"),
        row: "row",
        "mlp": "column_row_mlp",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    }
    assert result.counts == ({} if counted_by is None else {"self_attn": {counted_by: 2}})
    assert result.notes == [] and result.gathered == []


def raise_in_backward(_grad: Tensor) -> None:
    raise RuntimeError("no gradient")


class FailingAttention(NamedAttention):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(raise_in_backward)
        return y


def test_failure_on_all_heads_is_reported_as_such() -> None:
    module, call = FailingAttention(4).double(), Call((torch.randn(2, 3, 16, dtype=torch.float64),), {}, True, 1.0)
    verdict = verdict_on(module, Group(("q_proj", "k_proj", "v_proj"), "o_proj"), [call], 2, [{}])
    assert verdict.reason == "its forward or backward fails on all heads (RuntimeError: no gradient)"


@pytest.mark.parametrize(
    ("model", "tp_size", "reason"),
    [
        (AttentionBlock(num_heads=3), 2, "differs by|has the shape|fails on one rank's heads"),
        (Llama(LlamaArgs(n_kv_heads=2)), 4, "differs by|has the shape|fails on one rank's heads"),
        (AttentionBlock(norm=16), 2, "fails on one rank's heads"),
    ],
    ids=["three heads", "few key heads", "a norm over all heads"],
)
def test_indivisible_attention_is_gathered(model: nn.Module, tp_size: int, reason: str) -> None:
    result = assign_auto(model, tp_size)
    attention_styles = {style for name, style in styles(result).items() if "attention" in name or "attn" in name}
    assert attention_styles == {"column_gather_output", "row_split_input"}
    assert re.search(reason, result.gathered[0][1]), result.gathered
    assert result.gathered[0][0] in ("self_attn", "layers.0.attention")
    assert "column_row_mlp" in styles(result).values()


def test_indivisible_head_count_is_gathered() -> None:
    model = AttentionBlock()
    model.self_attn = FromConfig()
    result = assign_auto(model, 2)
    assert styles(result)["self_attn.q_proj"] == "column_gather_output"
    [warning] = result.warnings()
    assert warning.startswith("'self_attn': its weights are sharded and its activations gathered: ")


class Storing(NamedAttention):
    """Stores its values by heads in an attribute, which code around the model may read."""

    def forward(self, x: Tensor) -> Tensor:
        self.values = self.v_proj(x)
        return super().forward(x)


def test_stored_tensors_are_warned_of_inside_and_gathered_outermost() -> None:
    model = AttentionBlock()
    model.self_attn = Storing()
    result = assign_auto(model, 2)
    assert styles(result)["self_attn.q_proj"] == "column"
    [warning] = result.warnings()
    assert warning.startswith("'self_attn': it keeps tensors in attributes, which have one rank's features now; code")
    # Only the attention itself can be called: its attribute is for the code around it.
    result = assign_auto(nn.ModuleDict({"attention": Storing()}), 2)
    assert styles(result)["attention.q_proj"] == "column_gather_output"
    [(name, reason)] = result.gathered
    assert name == "attention" and reason.startswith("it keeps tensors in attributes, which code outside may read")


class TakesADict(NamedAttention):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["tokens"])


def test_uncallable_module_is_gathered() -> None:
    model = nn.ModuleDict({"attention": TakesADict(), "mlp": Swiglu(8)})
    result = assign_auto(model, 2)
    assert styles(result)["attention.q_proj"] == "column_gather_output"
    assert styles(result)["attention.o_proj"] == "row_split_input"
    [(name, reason)] = result.gathered
    assert name == "attention" and reason.startswith("weft could not call it ('attention': ")


def test_example_makes_module_callable() -> None:
    model = TakesADict()
    example = ({"tokens": torch.ones(2, 5, 16)},)
    result = assign_auto(model, 2, example=example)
    assert styles(result)["q_proj"] == "column" and result.gathered == []


def test_head_norms_are_replicated_with_summed_gradients() -> None:
    result = assign_auto(AttentionBlock(norm=4), 2)
    assert styles(result)["self_attn.q_proj"] == "column"
    assert styles(result)["self_attn.q_norm"] == "replicate_sum_gradients"


def test_names_suffice_without_verification() -> None:
    model = AttentionBlock()
    model.self_attn = FromConfig(counted_by="n_heads")
    result = assign_auto(model, 2, verify="never")
    assert styles(result)["self_attn.q_proj"] == "column" and result.counts["self_attn"] == {"n_heads": 2}


def test_kv_head_counts_are_divided() -> None:
    result = assign_auto(Llama(LlamaArgs(n_heads=4, n_kv_heads=2)), 2)
    assert result.counts["layers.0.attention"] == {"n_heads": 2, "n_kv_heads": 1}


def test_encoder_layers_are_sharded_if_correct() -> None:
    result = assign_auto(nn.ModuleDict({"good": EncoderLike(), "bad": EncoderLike(between=True)}), 2)
    between = {"bad": "replicate_sum_gradients", "bad.linear1": "column", "bad.linear2": "row"}
    assert styles(result) == {"good.linear1": "column", "good.linear2": "row", **between}


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
def test_embeddings_and_output_layers_with_enough_rows_are_sharded(args: LlamaArgs, reason: str | None) -> None:
    found = assign_auto(Llama(args), 2)
    assert styles(found).get("tok_embeddings") == (None if reason else "vocab_embedding")
    assert styles(found).get("output") == (None if reason else "column_gather_output")
    assert reason is None or any(reason in note for note in found.notes)


class Several(nn.Module):
    """An encoder and a decoder with one table and one output layer, and other layers with as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.other = nn.Embedding(16, 8), nn.Embedding(16, 8), nn.Embedding(12, 8)
        self.head, self.second = nn.Linear(8, 16, bias=False), nn.Linear(8, 16)
        self.decoder.weight = self.head.weight = self.encoder.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(2))
        self.attention, self.mlp = nn.MultiheadAttention(16, 2), FeedForward(8, 20)


def vocab_styles(model: nn.Module) -> dict[str, str]:
    other_modules = ("mlp", "blocks", "other", "attention")
    return {name: style for name, style in styles(assign_auto(model, 2)).items() if not name.startswith(other_modules)}


def test_tied_tables_and_output_layers_are_sharded() -> None:
    tables = dict.fromkeys(("encoder", "decoder"), "vocab_embedding")
    assert vocab_styles(Several()) == {**tables, **dict.fromkeys(("head", "second"), "column_gather_output")}
    found = assign_auto(Several(), 2)
    assert any("'other': left replicated: there is no output layer of 12 features" in note for note in found.notes)


def test_tables_with_shared_weight_stay_replicated() -> None:
    model = Several()
    model.second.register_parameter("table", model.encoder.weight)  # under another name
    assert vocab_styles(model) == {}
    model = Several()
    model.decoder = nn.Embedding(16, 8, max_norm=1.0)
    model.decoder.weight = model.encoder.weight
    assert vocab_styles(model) == {}
    assert any("tied to that of 'decoder', which cannot be sharded" in note for note in assign_auto(model, 2).notes)


def test_output_layer_with_shared_bias_stays_replicated() -> None:
    """No call of these models is known, so code may read the bias; tied parameters are never sharded differently."""
    model = Several()
    model.register_parameter("bias", model.second.bias)
    assert "second" not in vocab_styles(model)
    weightless = nn.ModuleDict({"table": nn.Embedding(16, 8), "head": nn.Linear(8, 16), "mlp": FeedForward(8, 20)})
    weightless.register_parameter("bias", weightless["head"].bias)
    assert vocab_styles(weightless) == {}


def test_output_layer_follows_tied_table() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(16, 8), "replicated": nn.Embedding(16, 8, max_norm=1.0)})
    model["head"], model["tied"], model["mlp"] = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), FeedForward(8, 20)
    model["tied"].weight = model["replicated"].weight
    assert vocab_styles(model) == {"table": "vocab_embedding", "head": "column_gather_output"}


class TiedBias(nn.Module):
    """An output layer as in BERT: its parent module also has the bias, and its weight is tied to the table."""

    def __init__(self, adds: float | None = None) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(18, 8), FeedForward(8, 20)
        self.head = nn.ModuleDict({"decoder": nn.Linear(8, 18)})
        self.head["decoder"].weight = self.table.weight
        self.head.register_parameter("bias", self.head["decoder"].bias)
        self.adds = adds

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head["decoder"](self.mlp(self.table(tokens)))
        return logits if self.adds is None else logits + self.adds * self.head.bias


def test_unread_shared_bias_is_sharded_with_its_layer() -> None:
    tables = {"table": "vocab_embedding", "head.decoder": "column_gather_output"}
    assert vocab_styles(TiedBias()) == tables
    assert vocab_styles(TiedBias(adds=0.0)) == {}


@on_ranks(2)
@pytest.mark.parametrize("adds", [None, 0.5])
def test_tied_bias_matches_unsharded(world_size: int, adds: float | None) -> None:
    torch.manual_seed(1)
    reference = TiedBias(adds).double()
    model = weft.parallelize(copy.deepcopy(reference), tensor_parallel(world_size), "auto")
    is_sharded = {name: p.placements[0].is_shard() for name, p in model.named_parameters() if "mlp" not in name}
    assert is_sharded == dict.fromkeys(("table.weight", "head.bias"), adds is None)
    tokens = torch.randint(18, (2, 5))
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(tokens).square().sum().backward()
        optimizer.step()
    assert model.head.bias is model.head["decoder"].bias
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter, rtol=1e-11, atol=1e-11)

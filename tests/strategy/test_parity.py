"""Parallelized models match unsharded copies over up to ten optimizer steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from support.models import (
    Attention,
    Conv1D,
    EncoderClassifier,
    FeedForward,
    Gpt2,
    Llama,
    LlamaArgs,
    rotary_tables,
    token_batches,
)
from support.parity import assert_same_training, tensor_parallel
from support.ranks import on_ranks

VOCAB = 37
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
PRECISIONS = pytest.mark.parametrize("dtype", list(DTYPES))


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def vectors(num: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 5, dim, generator=generator, dtype=dtype) for _ in range(num)]


@on_ranks(1, 2, 3, 4)
@OPTIMIZERS
@PRECISIONS
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_matches_unsharded(world_size: int, dtype: str, optimizer: str, bias: bool) -> None:
    model = FeedForward(8, 11, DTYPES[dtype], bias=bias)
    mesh = tensor_parallel(world_size)
    assert_same_training(
        lambda m: weft.parallelize(m, mesh, {"": "column_row_mlp"}),
        model,
        lambda m, x: m(x).square().mean(),
        vectors(10, 8, DTYPES[dtype]),
        optimizer,
    )


class AttentionLoss(nn.Module):
    def __init__(self, args: LlamaArgs, bias: bool) -> None:
        super().__init__()
        self.attention = Attention(args, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, *rotary_tables(5, self.attention.head_dim, x.dtype)).square().mean()


@on_ranks(1, 2, 4)
@OPTIMIZERS
@PRECISIONS
@pytest.mark.parametrize("n_kv_heads", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_matches_unsharded(world_size: int, dtype: str, optimizer: str, n_kv_heads: int, bias: bool) -> None:
    args = LlamaArgs(dim=32, n_heads=8, n_kv_heads=n_kv_heads, dtype=DTYPES[dtype])
    mesh = tensor_parallel(world_size)
    plan = {
        "attention.wq": {"style": "column", "heads": "n_heads"},
        "attention.wk": {"style": "column", "heads": "n_kv_heads"},
        "attention.wv": "column",
        "attention.wo": {"style": "row", "heads": "n_heads"},
    }
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, plan),
        AttentionLoss(args, bias),
        lambda m, x: m(x),
        vectors(10, 32, DTYPES[dtype]),
        optimizer,
    )
    assert model.attention.n_heads == 8 // world_size
    assert model.attention.n_kv_heads == n_kv_heads // world_size


LLAMA_PLAN = {
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention.wq": {"style": "column", "heads": "n_heads"},
    "layers.*.attention.wk": {"style": "column", "heads": "n_kv_heads"},
    "layers.*.attention.wv": "column",
    "layers.*.attention.wo": "row",
    "layers.*.feed_forward": "column_row_mlp",
}


@on_ranks(1, 2, 4)
@OPTIMIZERS
@PRECISIONS
def test_llama_matches_unsharded(world_size: int, dtype: str, optimizer: str) -> None:
    mesh = tensor_parallel(world_size)
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, LLAMA_PLAN if dtype == "float64" else "auto"),
        Llama(LlamaArgs(dtype=DTYPES[dtype])),
        token_loss,
        token_batches(10, VOCAB),
        optimizer,
    )
    styles = {row.parameter: row.style for row in weft.strategy.report(model).rows}
    assert styles["layers.1.feed_forward.w1.weight"] == "column_row_mlp"
    assert styles["layers.1.attention.wo.weight"] == "row"
    assert styles["tok_embeddings.weight"] == "vocab_embedding"
    assert styles["output.weight"] == ("replicate" if dtype == "float64" else "column_gather_output")


@on_ranks(3)
def test_llama_with_indivisible_heads_matches_unsharded(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, "auto"),
        Llama(LlamaArgs(dtype=torch.float64)),
        token_loss,
        token_batches(10, VOCAB),
        "AdamW",
    )
    assert model.layers[0].attention.n_heads == 4
    notes = weft.strategy.report(model).notes
    assert any("activations gathered: the 16 features of 'wq' do not divide by 3" in note for note in notes)


@on_ranks(2, 3)
@OPTIMIZERS
@PRECISIONS
@pytest.mark.parametrize("layer", ["Linear", "Conv1D"])
def test_gpt2_matches_unsharded(world_size: int, dtype: str, optimizer: str, layer: str) -> None:
    mesh = tensor_parallel(world_size)
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, "auto"),
        Gpt2(linear=nn.Linear if layer == "Linear" else Conv1D, dtype=DTYPES[dtype]),
        token_loss,
        token_batches(10, VOCAB),
        optimizer,
    )
    styles = {row.parameter: row.style for row in weft.strategy.report(model).rows}
    assert styles["h.1.mlp.c_proj.weight"] == "column_row_mlp"
    assert styles["wte.weight"] == "replicate"


@on_ranks(2, 4)
@OPTIMIZERS
@PRECISIONS
def test_transformer_encoder_matches_unsharded(world_size: int, dtype: str, optimizer: str) -> None:
    mesh = tensor_parallel(world_size)
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, "auto"),
        EncoderClassifier(dtype=DTYPES[dtype]),
        token_loss,
        token_batches(10, VOCAB),
        optimizer,
    )
    styles = {row.parameter: row.style for row in weft.strategy.report(model).rows}
    assert styles["encoder.layers.1.linear1.weight"] == "column"
    assert styles["encoder.layers.1.linear2.weight"] == "row"


@on_ranks(2)
def test_transformer_encoder_in_eval_mode_matches_unsharded(world_size: int) -> None:
    model = EncoderClassifier().eval()
    tokens = token_batches(1, VOCAB)[0][0]
    expected = model(tokens).detach()
    weft.parallelize(model, tensor_parallel(world_size), "auto")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_tied_head_matches_unsharded(world_size: int) -> None:
    mesh = tensor_parallel(world_size)
    model = assert_same_training(
        lambda m: weft.parallelize(m, mesh, "auto"),
        Llama(LlamaArgs(dtype=torch.float64, tie_head=True)),
        token_loss,
        token_batches(4, VOCAB),
        "AdamW",
    )
    assert model.output.weight is model.tok_embeddings.weight


@on_ranks(2)
def test_rnn_and_multihead_attention_match_unsharded(world_size: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True, dtype=torch.float64)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
            self.mlp = FeedForward(8, 12, torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.rnn(x)
            x, _ = self.attention(x, x, x)
            return self.mlp(x)

    mesh = tensor_parallel(world_size)
    assert_same_training(
        lambda m: weft.parallelize(m, mesh, "auto"),
        Mixed(),
        lambda m, x: m(x).square().mean(),
        vectors(5, 8, torch.float64),
        "AdamW",
    )

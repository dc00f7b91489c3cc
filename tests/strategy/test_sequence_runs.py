"""Which blocks exchange shards of the sequence, and which get all tokens."""

from __future__ import annotations

import pytest
import torch
from strategy.sequence_models import ATTENTION, ROWS, TOKENS, sequence_parallel, token_loss
from torch import Tensor, nn

import weft
from support.models import FeedForward, Llama, LlamaArgs
from support.parity import assert_same_training
from support.ranks import on_ranks


@on_ranks(2)
def test_unsharded_blocks_get_all_tokens(world_size: int) -> None:
    torch.manual_seed(0)
    rules = {name.replace("*", str(i)): style for i in (0, 2, 3) for name, style in {**ROWS, **ATTENTION}.items()}
    assert_same_training(
        lambda m: sequence_parallel(m, world_size, rules),
        Llama(LlamaArgs(dtype=torch.float64, n_layers=5)),
        token_loss,
        TOKENS,
        "SGD",
    )


@on_ranks(2)
def test_blocks_out_of_order_raise(world_size: int) -> None:
    model = sequence_parallel(Llama(LlamaArgs()), world_size, {**ROWS, **ATTENTION})
    tokens, _ = TOKENS[0]
    for _ in range(2):
        with pytest.raises(TypeError, match="run the blocks in their order"):
            model.layers[1](torch.randn(*tokens.shape, 16), model.cos, model.sin)
        model(tokens)


class WithMlps(nn.Module):
    """A language model before a list of MLPs, which are not inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Llama(LlamaArgs(dtype=torch.float64))
        self.mlps = nn.ModuleList(FeedForward(37, 24, torch.float64) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(tokens)
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


@on_ranks(2, 4)
def test_mlps_outside_blocks_get_all_tokens(world_size: int) -> None:
    torch.manual_seed(0)
    rules = {f"body.{name}": style for name, style in {**ROWS, **ATTENTION}.items()} | {"mlps.*": "column_row_mlp"}
    model = assert_same_training(
        lambda m: sequence_parallel(m, world_size, rules), WithMlps(), token_loss, TOKENS, "SGD"
    )
    weft.strategy.check_replicated_gradients(model)

"""Building blocks of the cases: the type of a case, projections, blocks and the models around them.

Legend of shapes: b batch, t length, h heads, g key-value heads, d features of one head, D = D_MODEL.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D_MODEL, NUM_HEADS, HEAD_DIM = 48, 12, 4
VOCAB, FLOAT_FEATURES = 40, 20
NUM_BLOCKS = 2


class Sharding(enum.Enum):
    """The least sharding of an attention's weights by plan="auto" on two ranks. Results must match in any case."""

    HEADS = "sharded by heads"
    SHARDS = "weights sharded"
    ANY = "may be replicated"


@dataclass(frozen=True)
class Case:
    """One way to write attention, as a small float64 model."""

    name: str
    attention: Callable[[], nn.Module]
    min_sharding: Sharding
    model: Callable[[Callable[[], nn.Module]], nn.Module]
    world_sizes: tuple[int, ...]

    def build(self) -> nn.Module:
        """Return the unsharded model; its values are the same in every process.

        Random numbers are added to vectors and scalars, because an error such as adding a zero bias twice, or
        multiplying by a unit weight twice, would not change the results.
        """
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            model = self.model(self.attention)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        return model


@dataclass
class Cases:
    """The cases of one file. `@cases.add(name, min_sharding, ...)` above a class adds a model with this attention.

    `model` (default: Tokens) is called with the constructor, to which further arguments are bound. A `variant` differs
    from another case by a detail and runs on two ranks only, to save time.
    """

    all: list[Case] = field(default_factory=list)

    def add(self, name: str, min_sharding: Sharding, model: Any = None, **arguments: Any) -> Any:
        return self._added(name, min_sharding, model, (2, 3, 4), arguments)

    def variant(self, name: str, min_sharding: Sharding, model: Any = None, **arguments: Any) -> Any:
        return self._added(name, min_sharding, model, (2,), arguments)

    def _added(
        self, name: str, min_sharding: Sharding, model: Any, world_sizes: tuple[int, ...], arguments: dict[str, Any]
    ) -> Callable[[type[nn.Module]], type[nn.Module]]:
        def add(cls: type[nn.Module]) -> type[nn.Module]:
            self.all.append(Case(name, lambda: cls(**arguments), min_sharding, model or Tokens, world_sizes))
            return cls

        return add


class Mlp(nn.Module):
    """Its names are unknown to plan="auto", so that no time goes into comparing it with the fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(D_MODEL, 28), nn.Linear(28, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.widen(x)))


class ShardedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D_MODEL, 28), nn.Linear(28, D_MODEL)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden_states)))


class Block(nn.Module):
    """Pre-norm block; passes `context` on to the attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.attn, self.mlp = attention, Mlp()

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), *context)
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    """Ids `[b, t]` -> logits `[b, t, VOCAB]`."""

    def __init__(self, attention: Callable[[], nn.Module], block: Callable[[nn.Module], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.blocks = nn.ModuleList(block(attention()) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vectors(nn.Module):
    """Floats `[b, t, FLOAT_FEATURES]` -> `[b, t, 7]`, with the names of Hugging Face's blocks."""

    takes_floats = True

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(FLOAT_FEATURES, D_MODEL), nn.Linear(D_MODEL, 7)
        self.layers = nn.ModuleList(_VectorsBlock(attention()) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(hidden_states=x)
        return self.head(x)


class _VectorsBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(D_MODEL), attention
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(D_MODEL), ShardedMlp()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Module(nn.Module):
    """A model in the attribute `model` of another module, as in a LightningModule."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = Tokens(attention)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class Separate(nn.Module):
    """Query, key, value and output layers and counts of heads, with Llama's names; subclasses define the forward."""

    def __init__(self, n_heads: int = NUM_HEADS, n_kv_heads: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads or n_heads, HEAD_DIM
        self.wq = nn.Linear(D_MODEL, n_heads * HEAD_DIM, bias=bias)
        self.wk = nn.Linear(D_MODEL, self.n_kv_heads * HEAD_DIM, bias=bias)
        self.wv = nn.Linear(D_MODEL, self.n_kv_heads * HEAD_DIM, bias=bias)
        self.wo = nn.Linear(n_heads * HEAD_DIM, D_MODEL, bias=bias)


class HuggingFace(nn.Module):
    """The layers and counts of Separate, with the names of Hugging Face's Llama; subclasses define the forward."""

    def __init__(self, num_heads: int = NUM_HEADS, num_key_value_heads: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads or num_heads
        self.head_dim = HEAD_DIM
        self.q_proj = nn.Linear(D_MODEL, num_heads * HEAD_DIM, bias=bias)
        self.k_proj = nn.Linear(D_MODEL, self.num_key_value_heads * HEAD_DIM, bias=bias)
        self.v_proj = nn.Linear(D_MODEL, self.num_key_value_heads * HEAD_DIM, bias=bias)
        self.o_proj = nn.Linear(num_heads * HEAD_DIM, D_MODEL, bias=bias)


class Fused(nn.Module):
    """Query, key and value in one layer, with the names of timm's attention; subclasses define the forward."""

    def __init__(self, out_features: int = 3 * D_MODEL, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim = NUM_HEADS, HEAD_DIM
        self.qkv, self.proj = nn.Linear(D_MODEL, out_features, bias=bias), nn.Linear(D_MODEL, D_MODEL, bias=bias)


def split_heads(features: Tensor, num_heads: int) -> Tensor:
    """`[b, t, h * d]` -> `[b, h, t, d]`."""
    return features.view(*features.shape[:2], num_heads, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """`[b, h, t, d]` -> `[b, t, h * d]`."""
    return heads.transpose(1, 2).flatten(2)


def causal_mask(length: int) -> Tensor:
    """Return a mask `[t, t]`, True where a query attends to a key."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def causal_weights(scores: Tensor) -> Tensor:
    """Return the softmax of scores `[b, h, t, t]` over the keys that each query attends to."""
    return scores.masked_fill(~causal_mask(scores.shape[-1]), -torch.inf).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of `[b, h, t, d]`, written out."""
    return causal_weights(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5) @ v

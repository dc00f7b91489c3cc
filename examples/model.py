"""A small Llama-style language model in plain PyTorch, without weft or Lightning.

Shapes: B sequences of T tokens, D model dim, H heads of K = D / H, F hidden dim of the feed-forward, V tokens
in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelArgs:
    """Sizes of a model.

    Attributes:
        dim: D, a multiple of 2 * n_heads (rotary embeddings rotate pairs).
        n_layers: number of blocks.
        n_heads: H; attention is sharded if the number of tensor-parallel ranks divides H.
        hidden_dim: F.
        vocab_size: V; 256 for bytes.
        max_seq_len: the longest T.
    """

    dim: int = 128
    n_layers: int = 4
    n_heads: int = 4
    hidden_dim: int = 384
    vocab_size: int = 256
    max_seq_len: int = 128

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"ModelArgs: got dim={self.dim} with n_heads={self.n_heads}; "
                f"choose a multiple of 2 * n_heads = {2 * self.n_heads} as dim."
            )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim: `[..., D]` -> `[..., D]`."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(seq_len: int, head_dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency, each `[T, K]`; complex numbers would not support bfloat16."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) of the last dim of x `[B, H, T, K]` by the angle of its position and frequency."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions: `[B, T, D]` -> `[B, T, D]`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads  # tensor parallelism sets it to this rank's number of heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, args.dim, bias=False)
        self.wv = nn.Linear(args.dim, args.dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(self.wq(x)), self.heads(self.wk(x)), self.heads(self.wv(x))
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """`[B, T, H * K]` -> `[B, H, T, K]`."""
        return x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), `[..., D]` -> `[..., D]`."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and with a residual connection."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = RMSNorm(args.dim)
        self.ffn_norm = RMSNorm(args.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token ids `[B, T]` -> logits of the next token `[B, T, V]`."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        cos, sin = rotary_tables(args.max_seq_len, args.dim // args.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw matrices from normal distributions; wo and w2, which add to the residual, are smaller in deep models."""
        nn.init.normal_(self.tok_embeddings.weight, std=1.0)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name != "tok_embeddings.weight":
                depth = 2 * len(self.layers) if name.endswith(("wo.weight", "w2.weight")) else 1
                nn.init.normal_(parameter, std=0.5 * (parameter.shape[1] * depth) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        seq_len = tokens.shape[1]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:seq_len], self.sin[:seq_len])
        return self.output(self.norm(x))

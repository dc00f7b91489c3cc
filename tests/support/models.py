"""Small reference models with the layer names that plans and plan="auto" encounter in practice."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class LlamaArgs:
    dim: int = 16
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int | None = None
    hidden_dim: int = 38
    vocab_size: int = 37
    tie_head: bool = False
    head_bias: bool = False
    dtype: torch.dtype = torch.float32


class RMSNorm(nn.Module):
    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotary_tables(length: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each `[length, head_dim / 2]`."""
    frequencies = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x `[batch, length, heads, head_dim]`, whose halves are real and imaginary parts."""
    real, imaginary = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; grouped-query attention if `n_kv_heads` < `n_heads`."""

    def __init__(self, args: LlamaArgs, bias: bool = False) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.n_kv_heads = args.n_kv_heads or args.n_heads
        self.head_dim = args.dim // args.n_heads
        dim, kv_dim = args.dim, self.n_kv_heads * self.head_dim
        self.wq = nn.Linear(dim, dim, bias=bias, dtype=args.dtype)
        self.wk = nn.Linear(dim, kv_dim, bias=bias, dtype=args.dtype)
        self.wv = nn.Linear(dim, kv_dim, bias=bias, dtype=args.dtype)
        self.wo = nn.Linear(dim, dim, bias=bias, dtype=args.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.wq(x).view(batch, length, self.n_heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim)
        groups = self.n_heads // self.n_kv_heads
        k, v = (t.repeat_interleave(groups, dim=2).transpose(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU with the names of Lightning's tensor-parallel example."""

    def __init__(self, dim: int, hidden_dim: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias, dtype=dtype)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias, dtype=dtype)
        self.w3 = nn.Linear(dim, hidden_dim, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim, args.dtype)
        self.attention_norm = RMSNorm(args.dim, args.dtype)
        self.ffn_norm = RMSNorm(args.dim, args.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids `[batch, length]` -> logits `[batch, length, vocab_size]`."""

    def __init__(self, args: LlamaArgs, max_length: int = 32) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim, dtype=args.dtype)
        self.layers = nn.ModuleList(LlamaBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.dtype)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=args.head_bias, dtype=args.dtype)
        if args.tie_head:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = rotary_tables(max_length, args.dim // args.n_heads, args.dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


class Conv1D(nn.Module):
    """A linear layer with the weight `[in, out]`, the layout of GPT-2's checkpoints."""

    def __init__(self, nf: int, nx: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=dtype) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf, dtype=dtype) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class Gpt2Attention(nn.Module):
    def __init__(self, dim: int, n_head: int, linear: type[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = _gpt2_layer(linear, dim, 3 * dim, dtype)
        self.c_proj = _gpt2_layer(linear, dim, dim, dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            t.view(batch, length, self.n_head, dim // self.n_head).transpose(1, 2)
            for t in self.c_attn(x).split(dim, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, dim))


class Gpt2Mlp(nn.Module):
    def __init__(self, dim: int, linear: type[nn.Module], dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.c_fc = _gpt2_layer(linear, dim, 4 * dim, dtype)
        self.c_proj = _gpt2_layer(linear, 4 * dim, dim, dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Gpt2Block(nn.Module):
    def __init__(self, dim: int, n_head: int, linear: type[nn.Module], dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, dtype=dtype)
        self.attn = Gpt2Attention(dim, n_head, linear, dtype)
        self.ln_2 = nn.LayerNorm(dim, dtype=dtype)
        self.mlp = Gpt2Mlp(dim, linear, dtype, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """Token ids -> logits; the head is the token embedding's weight, read as a plain attribute."""

    def __init__(
        self,
        dim: int = 16,
        n_head: int = 4,
        n_layer: int = 2,
        vocab_size: int = 37,
        linear: type[nn.Module] = nn.Linear,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, dim, dtype=dtype)
        self.wpe = nn.Embedding(32, dim, dtype=dtype)
        self.h = nn.ModuleList(Gpt2Block(dim, n_head, linear, dtype, dropout) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(dim, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class EncoderClassifier(nn.Module):
    """torch's own encoder layers between a plain embedding and a plain head."""

    def __init__(
        self, dim: int = 16, n_layers: int = 2, vocab_size: int = 37, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, dtype=dtype)
        layer = nn.TransformerEncoderLayer(dim, 4, 3 * dim, dropout=0.0, batch_first=True, dtype=dtype)
        self.encoder = nn.TransformerEncoder(layer, n_layers)
        self.head = nn.Linear(dim, vocab_size, dtype=dtype)
        for each in self.encoder.layers:  # torch initializes these to zero, which would hide a bias added twice
            nn.init.uniform_(each.self_attn.in_proj_bias, -0.3, 0.3)
            nn.init.uniform_(each.self_attn.out_proj.bias, -0.3, 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def _gpt2_layer(linear: type[nn.Module], dim_in: int, dim_out: int, dtype: torch.dtype) -> nn.Module:
    if linear is nn.Linear:
        return nn.Linear(dim_in, dim_out, dtype=dtype)
    return linear(dim_out, dim_in, dtype=dtype)


def token_batches(num: int, vocab_size: int, seed: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Return `num` pairs (inputs, targets) of `[4, 9]` token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab_size, (2, 4, 9), generator=generator)) for _ in range(num)]

"""Which function is trained: a small Llama-like decoder over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config import ModelConfig


class RMSNorm(nn.Module):
    """Scale by the inverse root mean square over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each of shape (seq_len, head_dim / 2)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x (batch, heads, seq, head_dim) by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.n_kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.n_heads != self.n_kv_heads,
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer; the unit that FSDP shards."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class ByteLlama(nn.Module):
    """Tokens (batch, seq) of int64 to logits (batch, seq, vocab_size); seq is at most `config.seq_len`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rope_table(config.seq_len, config.head_dim, config.rope_theta)
        # Derived from the config, so a checkpoint does not carry them.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq_len:
            raise ValueError(f"a sequence of {seq} tokens is longer than the model's {self.config.seq_len}")
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

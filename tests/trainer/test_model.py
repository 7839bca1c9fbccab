"""The reference model: shapes, causality, and what is shared."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.config import ModelConfig
from trainer.model import ByteLlama, RMSNorm, rope_table, rotate

SMALL = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, seq_len=16)


def make(**changes: object) -> ByteLlama:
    torch.manual_seed(0)
    return ByteLlama(dataclasses.replace(SMALL, **changes)).eval()


def tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seq", [1, 7, 16])
def test_logits_have_one_row_per_position_and_one_column_per_byte(seq: int) -> None:
    logits = make()(tokens(3, seq))
    assert logits.shape == (3, seq, 256)
    assert torch.isfinite(logits).all()


def test_a_position_does_not_see_what_follows_it() -> None:
    model, before = make(), tokens(1, 16)
    after = before.clone()
    after[0, 9] = (after[0, 9] + 1) % 256
    with torch.no_grad():
        changed = (model(before) != model(after)).any(-1)[0]
    assert not changed[:9].any()
    assert changed[9:].all()


def test_order_matters() -> None:
    model, forward = make(n_layers=1), tokens(1, 16)
    swapped = forward.clone()
    swapped[0, [3, 4]] = forward[0, [4, 3]]
    with torch.no_grad():
        assert not torch.allclose(model(forward)[0, -1], model(swapped)[0, -1])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rope_table(32, 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    q, k = rotate(q.expand(1, 1, 32, 8), cos, sin), rotate(k.expand(1, 1, 32, 8), cos, sin)
    scores = (q @ k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[..., :1].expand(1, 1, 32))
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(29), rtol=1e-4, atol=1e-5)


def test_rms_norm_gives_unit_root_mean_square() -> None:
    x = RMSNorm(64, 1e-6)(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 30)
    torch.testing.assert_close(x.square().mean(-1).sqrt(), torch.ones(5))


def test_tied_head_is_the_embedding_itself() -> None:
    tied, untied = make(tied_head=True), make(tied_head=False)
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert count(untied) - count(tied) == 256 * SMALL.dim


def test_dropout_acts_in_training_only() -> None:
    model, batch = make(dropout=0.5), tokens(1, 8)
    with torch.no_grad():
        assert torch.equal(model(batch), model(batch))
        model.train()
        assert not torch.equal(model(batch), model(batch))


def test_rotary_tables_are_not_part_of_the_state() -> None:
    assert not [name for name in make().state_dict() if "cos" in name or "sin" in name]


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens .* 16"):
        make()(tokens(1, 17))

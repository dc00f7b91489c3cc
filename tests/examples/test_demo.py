"""Unit tests of the demo: its data, its model, and the criteria of its comparison."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from support.example_modules import load_example


def make_run(devices: int = 1, losses: list[float] | None = None):
    losses = [5.0 - 0.02 * step for step in range(200)] if losses is None else losses
    seconds = [0.5 * (step + 1) for step in range(len(losses))]
    return load_example("side_by_side").Run(devices, 1000, 1000 // devices, 2048, losses, seconds)


def with_changed_loss(run, step: int, by: float):
    losses = list(run.losses)
    losses[step] += by
    return dataclasses.replace(run, devices=2, losses=losses)


def test_equal_runs_pass() -> None:
    lines, good = load_example("side_by_side").verdict([make_run(1), make_run(2)])
    assert good
    assert len(lines) == 4
    assert all(line.startswith("ok") for line in lines)


@pytest.mark.parametrize(
    ("step", "by", "good"),
    [
        (0, 1e-5, True),
        (0, 1e-3, False),
        (19, 1e-3, False),
        (20, 1e-3, True),
        (199, 0.019, True),
        (199, 0.021, False),
    ],
)
def test_loss_difference_limits(step: int, by: float, good: bool) -> None:
    lines, holds = load_example("side_by_side").verdict([make_run(1), with_changed_loss(make_run(1), step, by)])
    assert holds is good
    assert any(line.startswith("FAILED") for line in lines) is not good


@pytest.mark.parametrize("loss", [2.7, float("nan")])
def test_high_final_loss_fails(loss: float) -> None:
    assert not load_example("side_by_side").verdict([make_run(1, [loss] * 200)])[1]


def test_slow_loss_decrease_fails() -> None:
    run = make_run(1)
    slow = dataclasses.replace(run, seconds=[10 * s for s in run.seconds])
    assert load_example("side_by_side").verdict([run])[1]
    assert not load_example("side_by_side").verdict([slow])[1]


def test_nan_loss_fails() -> None:
    run = make_run(1)
    assert not load_example("side_by_side").verdict([run, with_changed_loss(run, 5, float("nan"))])[1]


def test_run_file_round_trips(tmp_path: Path) -> None:
    run = make_run(2)
    run.save(tmp_path / "run.json")
    assert type(run).load(tmp_path / "run.json") == run


def test_windows_depend_only_on_seed() -> None:
    text = load_example("text")
    data = text.documentation_bytes()
    assert len(data) > 100_000
    first, again = (text.Windows(data, 50, 32, seed=3) for _ in range(2))
    torch.rand(1)
    other = text.Windows(data, 50, 32, seed=4)
    assert first.starts == again.starts != other.starts
    tokens, targets = first[7]
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[1:], targets[:-1])
    assert torch.equal(tokens, data[first.starts[7] :][:32].long())


def test_windows_of_short_text_raise() -> None:
    with pytest.raises(ValueError, match=r"got a text of 8 bytes for windows of 8 \+ 1"):
        load_example("text").Windows(torch.zeros(8, dtype=torch.uint8), 1, 8, seed=0)


def test_model_is_causal_and_position_aware() -> None:
    model = load_example("model")
    torch.manual_seed(0)
    net = model.Transformer(
        model.ModelArgs(dim=32, n_layers=2, n_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=16)
    )
    tokens = torch.randint(64, (2, 16))
    changed_tail = tokens.clone()
    changed_tail[:, 10:] = (changed_tail[:, 10:] + 1) % 64
    logits, after = net(tokens), net(changed_tail)
    torch.testing.assert_close(logits[:, :10], after[:, :10])
    assert not torch.allclose(logits[:, 10:], after[:, 10:])
    # Swap the two preceding tokens: attention without positions could not tell them apart.
    a, b = net(torch.tensor([[1, 2, 3]])), net(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(a[:, 2], b[:, 2])


def test_rotary_scores_depend_only_on_distance() -> None:
    model = load_example("model")
    cos, sin = (table.double() for table in model.rotary_tables(12, 8))
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rotated_q, rotated_k = (model.rotate(v.expand(1, 1, 12, 8), cos, sin)[0, 0] for v in (q, k))
    scores = rotated_q @ rotated_k.T
    for distance in range(5):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)


def test_odd_head_dim_raises() -> None:
    with pytest.raises(ValueError, match=r"dim=30 with n_heads=2; choose a multiple"):
        load_example("model").ModelArgs(dim=30, n_heads=2)

"""A pipeline's fake mode asks for CUDA devices once, not for each operator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.strategy.pipeline.profile import profile_layers


def test_recordings_ask_for_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(3)))
    answers: list[bool] = []
    is_available = torch.cuda.is_available

    def asked() -> bool:
        answers.append(is_available())
        return answers[-1]

    monkeypatch.setattr(torch.cuda, "is_available", asked)

    profiles = profile_layers(model, torch.rand(2, 4), lambda x: model(x).square().mean(), measure="flops")
    assert sum(profile.forward for profile in profiles) == 3 * 2 * 2 * 4 * 4
    assert len(answers) == 1

"""The trainer's model: the initial loss, causality, 16-bit weights, and that it can learn."""

import math

import pytest
import torch

from zeroshard.train.config import ModelConfig
from zeroshard.train.language import continue_text
from zeroshard.train.model import GPT, rotate, rotations

SMALL = ModelConfig(layers=2, width=32, heads=2, context=16)


DRAWN = {"context": 16, "temperature": 0.8, "top_k": 2}


def small(seed: int = 0, tied: bool = False) -> GPT:
    torch.manual_seed(seed)
    return GPT(SMALL.model_copy(update={"tied": tied}), vocabulary=256)


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_loss_is_that_of_a_uniform_guess(tied: bool, dtype: torch.dtype) -> None:
    model = small(tied=tied).to(dtype)
    loss = model(tokens(1, 4, 16), tokens(2, 4, 16))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def test_looks_only_back() -> None:
    model = small()
    for parameter in model.parameters():  # blocks start as the identity, which mixes no positions
        torch.nn.init.normal_(parameter, std=0.2)
    before = tokens(1, 1, 16)
    after = before.clone()
    after[0, 10:] += 1
    after %= 256
    a, b = model(before), model(after)
    torch.testing.assert_close(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])


def test_rotation_keeps_lengths_and_sees_only_distance() -> None:
    table = rotations(context=32, dim=8)
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(1, 1, 32, 8)
    rotated = rotate(x, table)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    products = rotated[0, 0] @ rotated[0, 0].T
    torch.testing.assert_close(products[3, 7], products[20, 24])


def test_learns_one_sequence_by_heart() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = tokens(1, 2, 16), tokens(2, 2, 16)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_generation_repeats_and_outgrows_the_context() -> None:
    model = small()
    results = [
        continue_text(
            model,
            tokens(1, 1, 3),
            20,
            context=16,
            temperature=1.0,
            top_k=300,
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        for seed in (5, 5, 6)
    ]
    assert results[0] == results[1] != results[2]
    assert len(results[0][0]) == 23
    settings = {"context": 16, "temperature": 0.0, "top_k": 1}
    greedy = continue_text(model, tokens(1, 1, 3), 4, generator=torch.Generator(), **settings)
    assert greedy.shape == (1, 7)
    for number in (torch.nan, torch.inf):  # of a model that has diverged: the run raised at its end
        logits = torch.tensor([number, 0.0, -number]).expand(1, 3, 3)
        written = continue_text(lambda _, of=logits: of, tokens(1, 1, 3), 4, generator=torch.Generator(), **DRAWN)  # type: ignore[misc]
        assert written.shape == (1, 7)

"""`ShardedOptimizer(params, Class, ...)` in place of torch's ZeroRedundancyOptimizer or FairScale's OSS. Cases that
they support and that once failed here: parameters added or unfrozen later; leaf tensors that are no nn.Parameter;
nothing to train at all. Cases that must be refused: a bare tensor; parameters that differ between ranks (once a SIGABRT
in gloo).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.patience import HANG
from zeroshard.optim import Lamb
from zeroshard.testing import expect_same_logs, run_ranks

OPTIMIZERS = [(torch.optim.AdamW, {"lr": 0.05, "foreach": False}), (Lamb, {"lr": 0.05})]
BOTH = pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=["pieces", "whole"])


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 9), nn.Linear(9, 3).double()])


def run(model: nn.ModuleList, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
    return model[2](torch.tanh(model[1](torch.tanh(model[0](x)))).double()).square().mean()


def reduce(model: nn.Module, num_ranks: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(num_ranks)


class Pair:
    """The same model under a plain optimizer, and under a sharded one."""

    def __init__(self, rank: int, optimizer_class: Any, options: dict[str, Any], groups: Any) -> None:
        self.rank, self.models = rank, [layers(), layers()]
        self.optimizers: list[Any] = [
            optimizer_class(groups(self.models[0]), **options),
            zeroshard.ShardedOptimizer(groups(self.models[1]), optimizer_class, **options),
        ]
        self.number = 0

    def both(self, do: Any) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            do(model, optimizer)

    def train(self, steps: int, *, clear: bool = True) -> None:
        for _ in range(steps):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                if clear:
                    optimizer.zero_grad()
                loss = run(model, self.rank, self.number)
                if loss.requires_grad:
                    loss.backward()
                reduce(model, 3)
                optimizer.step()
            self.number += 1
        self.expect_equal()

    def expect_equal(self) -> None:
        for a, b in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), self.number
        plain, sharded = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert plain.keys() == sharded.keys()
        for index, state in plain.items():
            for key, value in state.items():
                assert torch.allclose(sharded[index][key], value, rtol=1e-5, atol=1e-7), (index, key)


@BOTH
def test_parameters_may_be_added_later(optimizer_class: Any, options: dict[str, Any]) -> None:
    def check(rank: int) -> Any:
        pair = Pair(rank, optimizer_class, options, lambda model: model[1].parameters())
        pair.train(2)
        pair.both(
            lambda model, optimizer: optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        )
        pair.train(2)
        pair.both(lambda model, optimizer: optimizer.add_param_group({"params": model[2].weight}))
        pair.both(lambda model, optimizer: optimizer.add_param_group({"params": [model[2].bias]}))
        pair.train(2)
        pair.optimizers[1].load_state_dict(pair.optimizers[0].state_dict())
        pair.train(1)
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            pair.optimizers[1].add_param_group({"params": [pair.models[1][0].weight]})
        return pair.optimizers[1].handle.comm_log

    found = run_ranks(check, 3)
    if optimizer_class is not Lamb:
        expect_same_logs(found)


@BOTH
def test_freezing_and_unfreezing(optimizer_class: Any, options: dict[str, Any]) -> None:
    def check(rank: int) -> Any:
        def groups(model: nn.ModuleList) -> list[dict[str, Any]]:
            model[1].requires_grad_(False)
            model[2].bias.requires_grad_(False)
            return [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1:].parameters())}]

        pair = Pair(rank, optimizer_class, options, groups)
        pair.train(2)
        pair.both(lambda model, optimizer: model[1].requires_grad_(True))
        pair.train(1)
        pair.both(lambda model, optimizer: model[0].requires_grad_(False))
        pair.train(1)
        pair.both(lambda model, optimizer: model.requires_grad_(True))
        pair.train(2)
        assert len(pair.optimizers[1].handle.engine.units) > 2
        return pair.optimizers[1].handle.comm_log

    found = run_ranks(check, 3)
    if optimizer_class is not Lamb:
        expect_same_logs(found)


@BOTH
def test_nothing_to_train_until_later(optimizer_class: Any, options: dict[str, Any]) -> None:
    def check(rank: int) -> None:
        pair = Pair(rank, optimizer_class, options, lambda model: model.requires_grad_(False).parameters())
        assert pair.optimizers[1].clip_grad_norm_(1.0) == 0.0 and not pair.optimizers[1].step().applied
        pair.train(2)
        assert pair.optimizers[1].handle.memory()["weights"] == 0  # frozen parameters stay in their own storage
        pair.both(lambda model, optimizer: model[2].requires_grad_(True))
        pair.train(2)

    run_ranks(check, 3)


def test_a_step_without_gradients_does_nothing() -> None:
    def check(rank: int) -> None:
        pair = Pair(rank, *OPTIMIZERS[0], lambda model: model.parameters())
        pair.train(2)
        pair.both(lambda model, optimizer: optimizer.zero_grad())
        pair.both(lambda model, optimizer: optimizer.step())
        pair.both(lambda model, optimizer: optimizer.zero_grad(set_to_none=False))
        pair.both(lambda model, optimizer: optimizer.step())
        pair.expect_equal()
        pair.train(1)
        pair.both(lambda model, optimizer: optimizer.step())  # applies the same gradients again, as in torch
        pair.expect_equal()

    run_ranks(check, 3)


def test_leaf_tensors_and_what_else_may_be_passed() -> None:
    def check(rank: int) -> None:
        def leaves(of_rank: int = rank) -> list[Tensor]:
            torch.manual_seed(3 + of_rank)
            return [torch.randn(5, 3, requires_grad=True), torch.randn((), requires_grad=True), torch.randn(4)]

        SGD = torch.optim.SGD
        for passed in (
            lambda leaves: leaves,
            lambda leaves: iter(leaves),
            lambda leaves: [{"params": leaves[0]}, {"params": iter(leaves[1:])}],
            lambda leaves: [(f"name {i}", leaf) for i, leaf in enumerate(leaves)],
        ):
            mine = leaves()
            optimizer = zeroshard.ShardedOptimizer(passed(mine), SGD, lr=0.5, momentum=0.9)
            values = [leaf.detach().clone() for leaf in mine]
            for _ in range(2):
                optimizer.zero_grad()
                (mine[0].sum() + mine[1]).backward()
                optimizer.step()
            assert all(torch.allclose(leaf, value - 1.45) for leaf, value in zip(mine[:2], values[:2], strict=True))
            assert torch.equal(mine[2], values[2])
            assert all(leaf.is_leaf and type(leaf) is Tensor for leaf in mine)
            root = leaves()
            assert torch.equal(values[0], leaves(0)[0])  # all ranks begin with the values of rank 0
            state = optimizer.state_dict()
            assert state["state"].keys() == {0, 1}
            again = zeroshard.ShardedOptimizer(passed(root), SGD, lr=0.1, momentum=0.9)
            again.load_state_dict(state)
            assert again.param_groups[0]["lr"] == 0.5
        for wrong, error, text in (
            (torch.ones(3, requires_grad=True), TypeError, "found a tensor"),
            ([torch.ones(3, requires_grad=True) * 2], ValueError, "non-leaf"),
            ([1.0], TypeError, "can only optimize Tensors"),
            ([], ValueError, "empty parameter list"),
            ({"params": [mine[0]]}, TypeError, "can only optimize Tensors"),
            ([{"params": {mine[0]}}], TypeError, "ordered collections"),
            ([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], ValueError, "complex parameters are not"),
        ):
            with pytest.raises(error, match=text):
                zeroshard.ShardedOptimizer(wrong, SGD, lr=0.1)

    run_ranks(check, 2)


def test_ranks_that_differ_are_told() -> None:
    """Ranks differ in shapes, numbers of parameters, dtypes or `requires_grad`: refused before anything is
    broadcast."""

    def check(rank: int) -> None:
        odd = rank == 1
        for params in (
            [torch.ones(3 if odd else 2, requires_grad=True)],
            [torch.ones(2, requires_grad=True) for _ in range(2 if odd else 1)],
            [torch.ones(2, requires_grad=True, dtype=torch.float64 if odd else torch.float32)],
            [torch.ones(2, requires_grad=odd)],
        ):
            with pytest.raises(ValueError, match=r"the ranks have different models: rank 0 has .* where rank 1"):
                zeroshard.ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
            assert all(parameter.eq(1).all() for parameter in params)
        params = [torch.ones(2, requires_grad=not i) for i in range(3)]
        optimizer = zeroshard.ShardedOptimizer(params, torch.optim.SGD, lr=0.5)
        params[0].grad = torch.ones(2)
        params[1].requires_grad_(odd)
        with pytest.raises(ValueError, match=r"the ranks differ in which parameters require grad: parameter number 1 "):
            optimizer.step()
        assert params[0].eq(1).all()
        params[1].requires_grad_(True)
        optimizer.step()
        assert params[0].eq(0.5).all() and params[1].eq(1).all()
        with pytest.raises(ValueError, match=r"rank 0 has .*4.* where rank 1 has .*5"):
            optimizer.add_param_group({"params": [torch.ones(5 if odd else 4, requires_grad=True)]})
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        assert params[0].eq(0).all()

    run_ranks(check, 3, collective_timeout=HANG)

"""torch: test/test_optim.py, test/optim/test_lrscheduler.py and test_swa_utils.py, with inputs as in the database
`torch.testing._internal.common_optimizers.optim_db`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import zeroshard
from tests.kit import PLANS
from tests.outside.common import Twins, in_fp64, numbers
from tests.together import on_ranks

OPTIM = torch.optim

INPUTS: list[tuple[Any, dict[str, Any]]] = [
    (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (OPTIM.Adam, {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.5), torch.tensor(0.9)), "amsgrad": True}),
    (OPTIM.Adadelta, {"rho": 0.95, "weight_decay": 0.9, "foreach": True}),
    (OPTIM.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.5, "weight_decay": 0.1}),
    (OPTIM.ASGD, {"lr": 0.02, "t0": 1, "weight_decay": 0.1, "maximize": True}),
    (OPTIM.NAdam, {"momentum_decay": 6e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (OPTIM.RMSprop, {"centered": True, "momentum": 0.1, "maximize": True, "weight_decay": 0.1}),
    (OPTIM.Rprop, {"etas": (0.2, 1.1), "step_sizes": (0.001, 2.0), "maximize": True}),
    (OPTIM.Adafactor, {"weight_decay": 0.1, "maximize": True, "d": 1.5}),
    (OPTIM.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
]


def small(*, bias: bool = True, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(61) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 61, bias=bias), middle, nn.Linear(61, 7, bias=bias))


def train(twins: Twins, rank: int, steps: range) -> None:
    for step in steps:
        twins.backward(lambda model, step=step: model(numbers(5, rank, step)).square().mean())
        twins.step()


def named(model: nn.Module) -> Any:
    return model.named_parameters()


@on_ranks(2)
@in_fp64
def test_each_class_with_its_options(rank: int) -> None:
    """test_forloop_goes_right_direction, test_foreach_matches_forloop, test_state_dict_deterministic,
    test_can_load_older_state_dict, test_load_nontensor_step: the plain optimizer has the state of the sharded one, and
    loads it without the newer options and with step counts that are numbers. Then both train on."""
    for number, (of_class, options) in enumerate(INPUTS):
        twins = Twins(small(bias=of_class is not OPTIM.Muon), PLANS[number % 4], of_class, **options)
        train(twins, rank, range(2))
        saved = copy.deepcopy(twins.optimizer.state_dict())
        expected = twins.plain_optimizer.state_dict()
        torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=0)
        assert saved["param_groups"] == expected["param_groups"]
        for state in saved["state"].values():
            state |= {"step": state["step"].item()} if isinstance(state.get("step"), Tensor) else {}
        twins.plain_optimizer.load_state_dict(saved)
        for option in ("maximize", "foreach", "fused", "differentiable", "capturable"):
            saved["param_groups"][0].pop(option, None)
        twins.optimizer.load_state_dict(saved)  # what it has not stays as it is
        assert twins.optimizer.param_groups[0].get("maximize", False) == options.get("maximize", False)
        train(twins, rank, range(2, 4))
        twins.expect_equal()
        twins.handle.close()


@on_ranks(2)
@in_fp64
def test_names_of_parameters_are_kept(rank: int) -> None:
    """test_can_load_from_to_named_state_dict, test_load_state_dict_pre_hook_and_prepend, and the errors of named and
    unnamed groups."""
    twins = Twins(small(), zeroshard.ZERO3, groups=named)
    train(twins, rank, range(2))
    both = (twins.optimizer, twins.plain_optimizer)
    assert [o.param_groups[0]["param_names"] for o in both] == [
        [name for name, _ in twins.plain.named_parameters()]
    ] * 2
    saved = copy.deepcopy(twins.optimizer.state_dict())
    for optimizer in both:
        with pytest.raises(ValueError, match=r"should be with/without names"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    del twins.optimizer, optimizer, both
    other = [(f"module.{name}", p) for name, p in twins.model.named_parameters()]
    twins.optimizer = zeroshard.ShardedOptimizer(other, OPTIM.Adam, lr=0.5)
    saved["extra"] = 1
    twins.optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {k: state.pop(k) for k in [*state] if k != "extra"}
    )
    twins.optimizer.load_state_dict(saved)
    assert list(saved) == ["state", "param_groups", "extra"], "a hook has a copy of the dict"
    (group,) = twins.optimizer.param_groups
    assert group["lr"] == 1e-2 and group["param_names"] == saved["param_groups"][0]["param_names"]
    train(twins, rank, range(2, 4))
    twins.expect_equal()


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], total_steps=9, three_phase=True),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, 2, mode="exp_range", gamma=0.9),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, min_lr=[0.001, 0.04], cooldown=1),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
    "in sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), SWALR(o, 0.03, anneal_epochs=2)], milestones=[2]
    ),
}


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*model[0].parameters()], "lr": 0.02}, {"params": [*model[2].parameters()]}]


@on_ranks(2)
@in_fp64
def test_schedulers_that_are_saved_and_loaded(rank: int) -> None:
    """TestLRScheduler: rates, momenta and weights after each step, also behind a new optimizer and a new scheduler."""
    for number, make in enumerate(SCHEDULERS.values()):
        twins = Twins(small(), PLANS[number % 4], OPTIM.SGD, groups=by_layer, lr=0.05, momentum=0.9)
        pair = [make(twins.optimizer), make(twins.plain_optimizer)]
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy((twins.optimizer.state_dict(), pair[0].state_dict()))
                del twins.optimizer, pair[0]
                twins.optimizer = zeroshard.ShardedOptimizer(by_layer(twins.model), OPTIM.SGD, lr=0.05, momentum=0.9)
                pair.insert(0, make(twins.optimizer))
                twins.optimizer.load_state_dict(saved[0]), pair[0].load_state_dict(saved[1])
            train(twins, rank, range(step, step + 1))
            for scheduler in pair:
                scheduler.step(*([1.0 + step % 2] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
            found, expected = (
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in (twins.optimizer, twins.plain_optimizer)
            )
            assert found == expected and pair[0].get_last_lr() == pair[1].get_last_lr()
        twins.expect_equal()
        twins.handle.close()


@on_ranks(2)
@in_fp64
def test_an_averaged_model_and_its_batch_norms(rank: int) -> None:
    """TestSWAUtils: `test_averaged_model_exponential`, `test_update_bn_dnn`. The average is made before `shard`."""
    for plan in (zeroshard.DDP, zeroshard.ZERO3):
        model = small(norm=True)
        averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2)]
        twins = Twins(model, plan, OPTIM.SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            train(twins, rank, range(step, step + 1))
            with twins.handle.unsharded():
                averages[0].update_parameters(twins.model)
            averages[1].update_parameters(twins.plain)
        for average in averages:
            update_bn([numbers(5, rank, 7), numbers(5, rank, 8)], average)
        torch.testing.assert_close(averages[0].state_dict(), averages[1].state_dict())
        twins.handle.close()


@on_ranks(2)
@in_fp64
def test_what_is_no_param_group_or_rate_raises_and_says_what_to_write(rank: int) -> None:
    """test_errors; and test_state_dict_pre_hook, whose hook writes to `optimizer.state["ran_..."]`. Nothing has been
    added afterwards. Under ZeRO-3 a bare parameter looked like a read of weights that are not there, and the text
    `"1e-3"` was a rate until the first step."""
    model = small()
    zeroshard.shard(model, "zero3")
    weight, *others = model.parameters()
    optimizer = zeroshard.ShardedOptimizer([weight], OPTIM.SGD, lr=0.1)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (others, TypeError, r'must be a dict, found an object of type list: write \{"params"'),
        (others[0], TypeError, "must be a dict, found a tensor"),
        ({"lr": 0.1}, KeyError, r"its parameters under 'params', found \['lr'\]"),
        *(
            ({"params": others, "lr": rate}, ValueError, f"must be a finite number from 0, found {words}")
            for rate, words in (("1e-3", "'1e-3'"), (torch.ones(2), r"tensor\(\[1., 1.\]\)"), (-1.0, "-1.0"))
        ),
    ]
    for group, error, words in wrong:
        with pytest.raises(error) as raised:
            optimizer.add_param_group(group)
        assert isinstance(raised.value, zeroshard.errors.Error)
        raised.match(words if error is not KeyError else words.replace("'", r"\\?'"))
    with pytest.raises(TypeError, match="must be a dict, found a tensor"):
        zeroshard.ShardedOptimizer([{"params": others[:1]}, others[1]], OPTIM.SGD, lr=0.1)
    with pytest.raises(KeyError, match=r"'done' is no parameter .* optimizer.param_groups\[0\]\['name'\] = value"):
        optimizer.state["done"] = True
    optimizer.add_param_group({"params": others, "lr": torch.tensor(0.1)})
    optimizer.param_groups[0]["done"] = True
    assert optimizer.state_dict()["param_groups"][0]["done"] and len(optimizer.param_groups) == 2

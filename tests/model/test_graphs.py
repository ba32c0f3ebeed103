"""Models and loops that are no plain stack of layers: every plan computes the same bits as one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import (
    HIDDEN,
    LENGTH,
    PLANS,
    VOCAB,
    WIDTH,
    Block,
    Gated,
    Job,
    Net,
    Outcome,
    beside_one_process,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train,
    train_reference,
)
from tests.together import Together, on_ranks
from zeroshard.model.absent import is_absent
from zeroshard.testing import expect_same_logs, run_ranks


def data(rank: int, micro_batch: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    return torch.randint(VOCAB, (3, LENGTH), generator=generator)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class Shared(Net):
    """Each block runs twice, not in a row."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))


class Reversed(Net):
    """Units run in another order than they are registered in."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Checkpointed(Net):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Net):
    """Activation checkpoints start inside a unit."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))


class Several(Net):
    """Blocks return a nested structure, one part of which goes directly to the loss."""

    class Inner(Block):
        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
            y = super().forward(x) * scale
            return {"x": y, "more": [(y * y).mean(), None, "text"]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, extra = self.embed(tokens), torch.zeros(())
        for index, block in enumerate(self.blocks):
            out = block(x, scale=torch.tensor(1.0 + index))
            x, extra = out["x"], extra + out["more"][0]
        return self.head(self.norm(x)), extra


class InPlace(Net):
    """Outputs of units are changed in place, or are views."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu_(block(x).view(3, -1)).view(3, tokens.shape[1], WIDTH)
        return self.head(self.norm(x))


class InPlaceOnViews(Net):
    """Outputs of units are views that are changed in place, as those of linear layers with a bias are, of three
    dimensions. Autograd then replaces the node that made the view: no hook told that backward had come there."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            # A view whatever torch's linear returns: that of 2.15 returns none.
            return self.down(torch.tanh(self.up(self.norm(x)))).flatten(1).view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(4))
        self.blocks[2].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            assert y._is_view()
            y += x
            x = y
        return self.head(self.norm(x)).mul_(2.0)


class Own(nn.Module):
    """Parameters directly on units and on the root: 0-d, empty, long, transposed, in a ParameterList."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(0, 7))
            self.transposed = nn.Parameter(torch.randn(HIDDEN, WIDTH).t())  # in a unit's buffer it is contiguous
            self.list = nn.ParameterList([torch.randn(WIDTH), torch.randn(1)])

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x @ self.transposed).sum(-1, keepdim=True) + self.nothing.sum()
            return x + self.scale * y * self.list[0] + self.list[1]

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return x @ self.embed.weight.t() + self.bias


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.inner = nn.Linear(1, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float()[..., None] / VOCAB
        return torch.cat([self.inner(x) * w * i for i, w in enumerate(self.weight)] * 12, -1)[..., :VOCAB]


class MixedDtypes(Net):
    """fp64 in the middle of fp32, in one unit."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.down.double()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))).double()).float()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(2))


class PartlyFrozen(Net):
    """Frozen units, and frozen parameters inside a unit."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Quantised(Net):
    """Frozen integer parameters next to trainable ones."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(-128, 128, (WIDTH,), dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.codes.to(x.dtype) / 128

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))


class Sometimes(Net):
    """One unit runs in odd steps only; a parameter of another unit is used in even steps only, and one never."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.never = Block()
        self.blocks[2].gate = nn.Parameter(torch.ones(WIDTH))
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if self.step % 2:
            x = self.blocks[1](x)
        x = self.blocks[2](x)
        if self.step % 2 == 0:
            x = x + self.blocks[2](x)
        return self.head(self.norm(x)) if self.step != 2 else self.head(x)


class Skips(Net):
    """Blocks that return their input: often two in a row, and different ones in each step.

    Backward once gathered such blocks, too, although another block had made their output, into the pool buffer that
    this other block still needed. With two of them in a row, gradients were computed from the weights of another
    unit."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.open else x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(6))
        self.step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.open = (self.step + index) % 3 == 0
        return super().forward(tokens)


class UsesParts(Net):
    """Modules that read the weights of submodules, and of the embedding, instead of calling these modules."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.norm(x) @ self.up.weight.t() + self.up.bias) @ self.down.weight.t()

    class Head(nn.Linear):
        def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
            return super().forward(x) + x @ table.weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = self.Head(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), self.embed)


class UsesOwnParts(UsesParts):
    class Head(nn.Linear):
        def forward(self, x: Tensor, table: nn.Embedding) -> Tensor:
            return super().forward(x)


def one_loss(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    tokens = data(rank, micro_batch, step)
    model.step = step
    logits = model(tokens)
    extra = 0.0
    if isinstance(logits, tuple):
        logits, extra = logits
    return (cross_entropy(logits, tokens) + extra) / micro_batches


def rank_dependent(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """Which parameters get a gradient is different on every rank, in every step and micro-batch."""
    for index, block in enumerate(model.blocks):
        block.open = (rank + step + micro_batch + index) % 3 == 0
    return one_loss(model, rank, micro_batch, step, micro_batches)


def partial_loss(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """One rank's gradient does not reach the blocks in odd steps."""
    tokens = data(rank, micro_batch, step)
    if rank == 1 and step % 2:
        return cross_entropy(model.head(model.norm(model.embed(tokens))), tokens)
    return cross_entropy(model(tokens), tokens)


def two_forwards(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """Two forwards with different lengths before one backward."""
    tokens = data(rank, micro_batch, step)
    first, second = model(tokens), model(tokens[:, 1:3])
    return cross_entropy(first, tokens) + 2 * cross_entropy(second, tokens[:, 1:3])


def looks_between(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """Between forward and backward: an evaluation, and a forward whose graph is dropped."""
    tokens = data(rank, micro_batch, step)
    loss = cross_entropy(model(tokens), tokens)
    with torch.no_grad():
        model(tokens[:, :2])
    model.eval()
    with torch.inference_mode():
        model(tokens[:, :1])
    model.train()
    model(tokens)
    return loss


def submodules(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """Parts of the model are called by themselves."""
    tokens = data(rank, micro_batch, step)
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    return cross_entropy(model.head(model.norm(x)), tokens)


def input_gradients(model: Any, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
    """`torch.autograd.grad` for a tensor that is no parameter, before the backward of the loss."""
    tokens = data(rank, micro_batch, step)
    scale = torch.ones((), requires_grad=True)
    x = model.blocks[0](model.embed(tokens) * scale)
    (slope,) = torch.autograd.grad(x.square().mean(), scale)
    return cross_entropy(model(tokens), tokens) * (1 + slope.detach())


def nested(module: nn.Module) -> bool:
    """Units inside units: each block is a unit, and so is its widest layer."""
    return isinstance(module, Block) or (isinstance(module, nn.Linear) and module.out_features == HIDDEN)


JOBS: dict[str, Job] = {
    "shared": Job(model=Shared),
    "reversed": Job(model=Reversed),
    "checkpointed": Job(model=partial(Checkpointed, blocks=3)),
    "checkpointed, reentrant": Job(model=partial(Reentrant, blocks=3)),
    "checkpointed inside": Job(model=CheckpointedInside),
    "several outputs": Job(model=Several),
    "in place": Job(model=InPlace),
    "views in place": Job(model=InPlaceOnViews),
    "views in place, divided": Job(model=InPlaceOnViews, units=1),
    "own parameters": Job(model=Own, units=Own.Part),
    "tiny": Job(model=Tiny, units=nn.Linear),
    "mixed dtypes": Job(model=MixedDtypes),
    "partly frozen": Job(model=PartlyFrozen),
    "sometimes": Job(model=Sometimes, steps=4),
    "skipped blocks": Job(model=Skips, steps=3),
    "skipped blocks, divided": Job(model=Skips, steps=3, units=1),
    "rank-dependent": Job(model=partial(Gated, 4), loss_of=rank_dependent, steps=3),
    "two forwards": Job(loss_of=two_forwards),
    "looks between": Job(loss_of=looks_between),
    "submodules": Job(loss_of=submodules),
    "gradients of inputs between": Job(loss_of=input_gradients),
    "nested units": Job(units=nested, model=partial(Net, blocks=4)),
    "every module a unit": Job(units=1),
    "one unit": Job(units=None),
    "parts used, not called": Job(model=UsesParts, units=None),
    "parts used, blocks": Job(model=UsesParts),
    "parts used, divided": Job(model=UsesOwnParts, units=12_000),
    "two classes": Job(units=(nn.LayerNorm, nn.Linear)),
    "bf16, several outputs": Job(model=Several, precision="bf16"),
    "bf16, partly frozen": Job(model=PartlyFrozen, precision="bf16"),
    "quantised": Job(model=Quantised),
    "bf16, quantised": Job(model=Quantised, precision="bf16"),
    "bf16, own parameters": Job(model=Own, units=Own.Part, precision="bf16-remainder"),
}
JOBS = {
    name: job if job.loss_of is not loss_of_tokens else replace(job, loss_of=one_loss) for name, job in JOBS.items()
}


AWKWARD = Together(JOBS, on_three=["own parameters", "tiny", "rank-dependent", "bf16, quantised"])


@pytest.mark.parametrize("name", JOBS)
def test_awkward_models_train_as_in_one_process(name: str) -> None:
    AWKWARD.expect_reference(name)


def test_a_job_that_differs_from_one_process_fails_alone() -> None:
    """The control of the tests above, whose jobs share their ranks."""

    def of_ranks(model: nn.Module, *args: int) -> Tensor:
        is_sharded = any(map(is_absent, model.parameters()))
        return loss_of_tokens(model, *args) * (1 + 1e-6 * is_sharded)

    jobs = Together({"right": Job(steps=1), "wrong": Job(steps=1, loss_of=of_ranks)}, plans=[zeroshard.ZERO3])
    jobs.expect_reference("right")
    with pytest.raises(AssertionError):
        jobs.expect_reference("wrong")


@on_ranks(2)
def test_units_smaller_than_what_uses_them_are_told_at_the_read(rank: int) -> None:
    for model, units in ((UsesParts, 12_000), (UsesOwnParts, 1)):
        with pytest.raises(RuntimeError, match=r"as no module of its unit runs .*let units= name a block"):
            train(Job(model=model, units=units), zeroshard.ZERO3, rank)
        train(Job(model=model, units=units), zeroshard.DDP, rank)


def test_a_rank_may_leave_out_whole_units_where_weights_are_at_hand() -> None:
    """Not under ZERO3: there its peers wait for its shard of the weights."""
    job = Job(loss_of=partial_loss, steps=3)
    Together({"left out": job}, plans=PLANS[:3]).expect_reference("left out")


def test_each_of_these_models_learns_something_of_its_own() -> None:
    """The negative control: the results that are compared above differ from each other and from the initial weights."""

    def run(rank: int) -> list[float]:
        return [sum(train_reference(job, 1)[0].losses) for job in JOBS.values()]

    sums = run_ranks(run, 1)[0]
    assert len(set(sums)) >= len(sums) - 9  # some jobs differ only in their units


# Loops ----------------------------------------------------------------------------------------------------------------


def expect_same_training(
    loop: Callable[[nn.Module, Callable[[Tensor], None], int, int], None],
    *,
    plans: tuple[zeroshard.Plan, ...] = PLANS,
    net: Callable[[], nn.Module] = Net,
    units: Any = Block,
    ranks: int = 2,
) -> None:
    """Run `loop(model, backward, rank, step)` under these plans, and compare it to one process that adds up
    gradients."""

    def plain() -> Any:
        model = make(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(2):
            totals: list[dict[str, Tensor]] = []
            for of_rank in range(ranks):
                model.zero_grad()
                loop(model, lambda loss, **options: loss.backward(**options), of_rank, step)
                totals.append({name: p.grad for name, p in model.named_parameters()})
            for name, parameter in model.named_parameters():
                parameter.grad = torch.stack([total[name] for total in totals]).sum(0) / ranks
            optimizer.step()
        return model.state_dict()

    def check(rank: int) -> list[Any]:
        expected, logs = plain(), []
        for plan in plans:
            model = make(net)
            handle = zeroshard.shard(model, plan, units=units)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            for step in range(2):
                optimizer.zero_grad()
                with handle.no_sync():
                    loop(model, optimizer.backward, rank, step)
                optimizer.backward(0 * loss_of_tokens(model, rank, 0, 0))  # reduces the accumulated gradients
                optimizer.step()
            weights = handle.full_state_dict()
            assert all(torch.equal(weights[name], expected[name]) for name in expected), plan
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, ranks), strict=True):
        expect_same_logs(logs)


def test_forwards_and_backwards_interleaved() -> None:
    def loop(model: nn.Module, backward: Any, rank: int, step: int) -> None:
        losses = [loss_of_tokens(model, rank, micro_batch, step) for micro_batch in range(3)]
        for index in (1, 2, 0):
            backward(losses[index])

    expect_same_training(loop)


def test_backward_twice_through_a_retained_graph() -> None:
    def loop(model: nn.Module, backward: Any, rank: int, step: int) -> None:
        loss = loss_of_tokens(model, rank, 0, step)
        backward(loss, retain_graph=True)
        backward(2 * loss)

    expect_same_training(loop)


class Scaled(Net):
    """The root unit has a weight in front of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_of_features_behind_a_backward(ranks: int) -> None:
    """A second backward that begins inside the model needs the units around, whose outputs it does not pass."""

    def loop(deep: str, model: Any, backward: Any, rank: int, step: int) -> None:
        features: list[Tensor] = []
        taps = [
            model.get_submodule(path).register_forward_hook(lambda *call: features.append(call[2]))
            for path in ("blocks.0", deep)
        ]
        loss = loss_of_tokens(model, rank, 0, step)
        if step:  # features first, and then those of another forward
            backward(features[1].square().mean(), retain_graph=True)
            loss_of_tokens(model, rank, 1, step)
            backward(features[3].square().mean())
        backward(loss, retain_graph=True)
        backward(features[0].square().mean(), retain_graph=True)
        backward(features[1].abs().mean())
        for tap in taps:
            tap.remove()

    for units, deep in ((nested, "blocks.1.up"), (Block, "blocks.2"), (1, "blocks.1.up")):
        plans = PLANS if units is nested and (EVERYTHING or ranks == 2) else PLANS[3:]
        expect_same_training(partial(loop, deep), plans=plans, net=Scaled, units=units, ranks=ranks)


def test_a_step_that_failed_in_forward_or_backward_can_be_repeated() -> None:
    """After an exception in user code on every rank (out of memory, say), the gradients are discarded and the step
    repeated."""

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError("in forward")

    def fail(_: Tensor) -> None:
        raise MemoryError("in backward")

    def check(rank: int) -> Any:
        results = []
        for plan in plans_of(1):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            for step in range(2):
                model.blocks[1].down, down = Failing(), model.blocks[1].down
                with pytest.raises(MemoryError, match="in forward"):
                    loss_of_tokens(model, rank, 0, step)
                model.blocks[1].down = down
                removable = model.blocks[1].register_forward_hook(
                    lambda module, args, out: out.register_hook(fail) and None
                )
                loss = loss_of_tokens(model, rank, 0, step)
                removable.remove()
                with pytest.raises(MemoryError, match="in backward"):
                    optimizer.backward(loss)
                optimizer.zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                optimizer.step()
            results.append(Outcome([], handle.full_state_dict(), handle.comm_log))
        return results

    expected, found = beside_one_process(lambda: train_reference(Job(steps=2), 2)[0].weights, check, 2)
    for plan_index, plan in enumerate(plans_of(1)):
        for rank in range(2):
            assert same_bits(found[rank][plan_index].weights, expected), plan
        expect_same_logs([found[rank][plan_index].log for rank in range(2)])


def test_dropout_and_batch_norm_are_the_same_under_every_plan() -> None:
    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(nn.functional.dropout(x, 0.3, self.training))
            return self.head(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))

    def run(rank: int) -> list[Outcome]:
        results = []
        for plan in plans_of(1):
            torch.manual_seed(rank)
            job = Job(model=Noisy, loss_of=partial(seeded, rank))
            results.append(train(job, plan, rank))
        return results

    def seeded(own: int, model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int) -> Tensor:
        torch.manual_seed(1000 * own + step)
        return loss_of_tokens(model, rank, micro_batch, step, micro_batches)

    found = run_ranks(run, 2)
    for by_plan in found:
        for outcome in by_plan[1:]:
            assert outcome.losses == by_plan[0].losses
            assert same_bits(outcome.weights, by_plan[0].weights)
    assert found[0][0].losses != found[1][0].losses
    assert "batch_norm.running_mean" in found[0][0].weights

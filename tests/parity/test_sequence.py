"""A step of the sharded optimizer in a small example: 16 elements on 4 ranks, 4 elements each, from gradients to
weights.

gradients   16 fp16 on every rank, all different
   | reduce-scatter                   4 reduced ones on each rank, in place
   | cast                             4 fp32 gradients of main
main        4 fp32 on each rank
   | step                             4 updated
   | cast                             4 fp16, into the own interval of the weights
weights     16 fp16 on every rank
   | all-gather                       all 16 updated on every rank, in place
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.transport import Reduction
from zeroshard.layout.layout import BufferLayout
from zeroshard.placement import PARTIAL, REPLICATED
from zeroshard.precision import NAMED
from zeroshard.ranks.mesh import Mesh
from zeroshard.storage.buffer import FlatBuffer
from zeroshard.storage.gradient_buffer import GradientBuffer
from zeroshard.storage.main_weights import MainWeights
from zeroshard.testing import expect_same_logs, run_ranks

LAYOUT = BufferLayout.pack([("a", (3,)), ("b", (5,)), ("c", (2, 3)), ("d", (2,))], 4, alignment=1, slot_alignment=1)
START = torch.linspace(-2, 2, 16)
FP16, CPU = torch.float16, torch.device("cpu")


def gradient(rank: int) -> Tensor:
    """[16] fp16: integers, so that sums in fp16 are exact."""
    return torch.arange(16).sub(6).mul(rank + 1).to(FP16)


def updated() -> tuple[Tensor, Tensor]:
    """fp32 main and fp16 weights of the 16 elements after the step, computed by plain torch in one process."""
    main = nn.Parameter(START.clone())
    main.grad = sum(gradient(rank).float() for rank in range(4)) / 4
    torch.optim.AdamW([main], lr=0.5, foreach=False).step()
    return main.detach(), main.detach().to(FP16)


def one_step(rank: int, gather: bool = True) -> tuple[Tensor, CommLog]:
    expected_main, expected_weights = updated()
    collectives = Collectives(Mesh.of(None), CommLog())
    own = LAYOUT.shard(rank)
    allocate = partial(collectives.transport.allocate, device=CPU)
    grads = GradientBuffer(LAYOUT, rank, FP16, PARTIAL, allocate)
    weights = FlatBuffer(LAYOUT, rank, FP16, REPLICATED, allocate)
    collectives.map_peers()
    collectives.log.clear()
    assert grads.full is not None and weights.full is not None and LAYOUT.numel == 16
    main = MainWeights(own, weights.shard, NAMED["fp16"])
    weights.full.copy_(START)
    main.set(own, START[own.slice])
    assert main.extra is not None and main.extra.shape == (4,) and main.extra.dtype == torch.float32

    grads.full.copy_(gradient(rank))
    num_bytes = max(PairwiseTransport.scratch_of_each(16, FP16, FP16, 4, 1, in_place=True))
    reduction = Reduction(torch.empty(num_bytes, dtype=torch.uint8), FP16)
    collectives.reduce_scatter(grads.full, grads.shard, reduction, unit="u", phase="backward").wait()
    assert torch.equal(grads.full[own.slice], sum(gradient(r) for r in range(4))[own.slice])
    others = [i for i in range(16) if i not in range(own.start, own.stop)]
    assert torch.equal(grads.full[others], gradient(rank)[others])

    main_grad = grads.shard.float()
    assert main_grad.shape == (4,)
    value = main.read(own)
    value.grad = main_grad / 4
    torch.optim.AdamW([value], lr=0.5, foreach=False).step()
    assert torch.equal(main.extra, expected_main[own.slice])
    assert torch.equal(weights.full, START.to(FP16))  # not gathered yet

    main.write(own, value)
    assert torch.equal(weights.full[own.slice], expected_weights[own.slice])
    assert torch.equal(weights.full[others], START.to(FP16)[others])

    if gather:
        before = weights.full.data_ptr()
        collectives.all_gather(weights.full, unit="u", phase="step").wait()
        assert weights.full.data_ptr() == before
        assert [(event.op, event.bytes) for event in collectives.log.entries] == [
            ("reduce_scatter", 12 * 2),
            ("all_gather", 12 * 2),
        ]
    return weights.full, collectives.log


@pytest.mark.by_gloo
def test_sixteen_elements_on_four_ranks() -> None:
    found = run_ranks(one_step, 4)
    for weights, _ in found:
        assert torch.equal(weights, updated()[1])
        assert weights.ne(START.to(FP16)).all()
    expect_same_logs([log for _, log in found])


@pytest.mark.by_gloo
def test_without_the_gather_each_rank_has_updated_four() -> None:
    for rank, (weights, _) in enumerate(run_ranks(one_step, 4, False)):
        changed = weights.ne(START.to(FP16)).nonzero().flatten().tolist()
        assert changed == list(range(4 * rank, 4 * rank + 4))

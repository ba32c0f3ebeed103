"""Placements and plans: a plan is three placements, and a change of placement is a collective.

| plan           | weights    | grads                              | main (master weights + optimizer state) |
|----------------|------------|------------------------------------|------------------------------------------|
| DDP            | REPLICATED | REPLICATED (PARTIAL until reduced) | REPLICATED                               |
| ZERO1          | REPLICATED | PARTIAL, own interval reduced      | SHARDED                                  |
| ZERO2          | REPLICATED | SHARDED                            | SHARDED                                  |
| ZERO3          | SHARDED    | SHARDED                            | SHARDED                                  |
| OPTIMIZER_ONLY | REPLICATED | REPLICATED, by other code          | SHARDED                                  |

`TRANSITIONS` lists the collectives of each change. Only `FlatBuffer.redistribute` issues them.

The stages are those of the ZeRO paper (Rajbhandari et al., 2020); placements as data are Megatron-FSDP v2's.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

from zeroshard.errors import InvalidValue


class Placement(Enum):
    """Which values of a flat buffer are valid on a rank."""

    REPLICATED = "replicated"  # all values, equal on every rank
    SHARDED = "sharded"  # the values of the own shard
    PARTIAL = "partial"  # all values, each a term of a sum over ranks that has not been taken

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is Python code, and this is hashed often


REPLICATED, SHARDED, PARTIAL = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL


class Move(Enum):
    """A collective on a flat buffer."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


TRANSITIONS: dict[tuple[Placement, Placement], tuple[Move, ...]] = {
    (SHARDED, REPLICATED): (Move.ALL_GATHER,),
    (PARTIAL, SHARDED): (Move.REDUCE_SCATTER,),
    (PARTIAL, REPLICATED): (Move.REDUCE_SCATTER, Move.ALL_GATHER),  # an all-reduce
    (REPLICATED, SHARDED): (),
}
"""The collectives of each change of placement; changes that are not listed are impossible."""


def moves(before: Placement, after: Placement) -> tuple[Move, ...]:
    """The collectives that change a buffer's placement from `before` to `after`.

    Raises:
        ValueError: there is no such transition (values that are complete cannot become terms of a sum).
    """
    if before is after:
        return ()
    path = TRANSITIONS.get((before, after))
    if path is None:
        raise InvalidValue(f"{before.value} values cannot become {after.value}")
    return path


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the three buffers of a unit rest between steps. `external_gradients`: other code (torch DDP for example)
    leaves reduced gradients in `p.grad`, and units have no gradient buffers."""

    name: str
    weights: Placement
    grads: Placement
    main: Placement
    external_gradients: bool = False

    def __repr__(self) -> str:
        return self.name.upper()

    @property
    def mean(self) -> Placement:
        """The placement of gradients after the reduction: REPLICATED if every rank updates all of main, or keeps all
        gradients."""
        return REPLICATED if REPLICATED in (self.grads, self.main) else SHARDED

    def takes_over_gradients(self, num_ranks: int, *, in_place: bool) -> bool:
        """Whether gradients stay in the tensors that autograd makes, one per parameter, and have no bucket: a single
        rank exchanges nothing, and its step uses them as they are (`in_place`: see `MixedPrecision`)."""
        return num_ranks == 1 and in_place and not self.external_gradients

    def check(self) -> None:
        """
        Raises:
            ValueError: the placements do not fit together; the message says why.
        """
        found, problem = (self.weights, self.grads, self.main), ""
        if not all(isinstance(one, Placement) for one in found):
            raise InvalidValue(
                f"plan {self.name!r}: expected three members of zeroshard.placement.Placement, found {found}"
            )
        if PARTIAL in (self.weights, self.main):
            problem = "only gradients can be partial"
        elif self.main is REPLICATED and self.weights is SHARDED:
            problem = "a rank would update all of main, and keep a part of the weights: shard main as well"
        elif self.main is REPLICATED and self.grads is SHARDED:
            problem = "to update all of main, a rank needs all gradients: shard main as well, or do not shard these"
        if problem:
            placements = f"weights {self.weights.value}, gradients {self.grads.value}, main {self.main.value}"
            raise InvalidValue(f"plan {self.name!r} ({placements}) is impossible: {problem}")


DDP = Plan("ddp", REPLICATED, REPLICATED, REPLICATED)
ZERO1 = Plan("zero1", REPLICATED, PARTIAL, SHARDED)
ZERO2 = Plan("zero2", REPLICATED, SHARDED, SHARDED)
ZERO3 = Plan("zero3", SHARDED, SHARDED, SHARDED)
OPTIMIZER_ONLY = Plan("optimizer_only", REPLICATED, REPLICATED, SHARDED, external_gradients=True)

PLANS = {plan.name: plan for plan in (DDP, ZERO1, ZERO2, ZERO3)}
"""The plans that `shard(model, plan)` accepts by name."""


_AS_WRITTEN_ELSEWHERE = {
    **{str(stage): plan for stage, plan in enumerate((DDP, ZERO1, ZERO2, ZERO3))},
    **{f"stage{stage}": plan for stage, plan in enumerate((DDP, ZERO1, ZERO2, ZERO3))},
    "zero0": DDP,
    "no_shard": DDP,
    "shard_grad_op": ZERO2,
    "full_shard": ZERO3,
    "fsdp": ZERO3,
    "fsdp2": ZERO3,
}
"""DeepSpeed's stages, and FSDP's strategies (its SHARD_GRAD_OP drops weights between steps, which ZERO2 does not)."""
_HYBRID = dict.fromkeys(("hybrid", "hybrid_shard", "hsdp"), ZERO3)
"""Names of ZERO3 over a mesh that also has an axis of replicas."""


def _in_letters(name: object) -> str:
    return str(name).lower().replace("-", "").replace("_", "").replace(" ", "")


def as_plan(plan: Plan | str | int, *, has_replicas: bool = False) -> Plan:
    """The plan for an argument: a plan, or its name here or in other libraries ("zero3", "ZeRO-3", 3, "full_shard").

    Args:
        has_replicas: whether the mesh has an axis of replicas. "hybrid" is ZERO3 then.

    Raises:
        ValueError: an unknown name (the message suggests the nearest one); placements that do not fit together;
            "hybrid" without an axis of replicas.
    """
    if isinstance(plan, Plan):
        plan.check()
        return plan
    if isinstance(plan, str) or (isinstance(plan, int) and not isinstance(plan, bool)):
        for name, known in {**PLANS, **_AS_WRITTEN_ELSEWHERE, **_HYBRID}.items():
            if _in_letters(name) != _in_letters(plan):
                continue
            if name in _HYBRID and not has_replicas:
                raise InvalidValue(
                    f"plan {plan!r}: hybrid sharding is a plan over a mesh of two axes: shard(model, 'zero3', mesh="
                    "init_device_mesh(device, (replicas, shards), mesh_dim_names=('dp_replicate', 'dp_shard'))); to "
                    "plan it, set replicas="
                )
            return known
    near = difflib.get_close_matches(str(plan).lower(), PLANS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidValue(f"unknown plan {plan!r}: expected one of {', '.join(map(repr, PLANS))}{hint}")

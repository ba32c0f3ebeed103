"""Plans the bytes of a checkpoint on disk: the ranks' files, each planned as by a save, without any values.

The manifest is not included. Random state is written as text, so that a file may differ by a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from zeroshard.checkpoint.commit import file_metadata
from zeroshard.checkpoint.contents import state_item
from zeroshard.checkpoint.folders import new_id
from zeroshard.checkpoint.rank_state import EncodedState, blob, random_state, whole
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.layout.cuts import cut
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Fragment
from zeroshard.placement import REPLICATED
from zeroshard.planner import PlannedUnit, Training, by_stepper
from zeroshard.planning.optimizers import Needs
from zeroshard.step.stepper import StateChunk, StateEntry, whole_entry

FILES_PLANNED = 64
"""With more ranks, only one rank's header is planned, and all are assumed to have its length."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a model and one optimizer. `buffers`: entries of the model's `state_dict` that are not sharded
    parameters."""

    training: Training
    needs: Needs
    buffers: Mapping[str, Tensor]

    @property
    def num_ranks(self) -> int:
        return self.training.topology.num_shards * self.training.topology.num_replicas

    def num_bytes(self, rank: int) -> int:
        """The bytes of all files; with more than FILES_PLANNED ranks, derived from the file of `rank`."""
        if self.num_ranks <= FILES_PLANNED:
            return sum(self.file(each).num_bytes for each in range(self.num_ranks))
        file = self.file(rank)
        besides = file.num_bytes - sum(item.num_bytes for item in file.items if _is_counted(item))
        buffers = sum(value.nbytes for value in self.buffers.values())
        return self.num_ranks * besides + self._num_bytes_of_values() + buffers * (rank != 0)

    def file(self, rank: int) -> FilePlan:
        """The file of a rank of the world."""
        metadata = file_metadata(1, new_id(), rank)
        return FilePlan.of([*self._items(rank), *self._rest(rank)], rank, metadata)

    # What is sharded -----------------------------------------------------------------------------------------------

    def _items(self, rank: int) -> Iterator[Item]:
        replica, shard = divmod(rank, self.training.topology.num_shards)
        for unit in self.training.units if replica == 0 else ():
            precision = unit.spec.precision
            dtype = precision.main_dtype if unit.spec.trainable else unit.spec.weight_dtype
            for slot in unit.layout.slots if rank == 0 else ():
                if not slot.world:
                    yield Item(f"model/{slot.name}", slot.shape, dtype, Interval(0, 0), _nothing)
            for fragment in unit.layout.fragments(shard):
                slot = fragment.slot
                yield Item(f"model/{slot.name}", slot.shape, dtype, fragment.param, _nothing)
            if unit.spec.trainable:
                yield from map(state_item, self._state_in_pieces(unit, shard))
        if replica == 0:
            yield from map(state_item, self._state_of_wholes(shard))

    def _state_in_pieces(self, unit: PlannedUnit, shard: int) -> Iterator[StateEntry]:
        keys = [self.needs.key_of(slot.name) for slot in unit.layout.slots]
        for _, world in cut(unit.layout, keys, within=unit.layout.shard(shard)):
            for fragment in unit.layout.fragments_in(world):
                if not self.needs.is_whole(fragment.slot.name):
                    yield from self._state_of(unit, fragment)

    def _state_of(self, unit: PlannedUnit, fragment: Fragment) -> Iterator[StateEntry]:
        slot, param = fragment.slot, fragment.param
        for entry in self.needs.entries(slot.name, 1, unit.spec.precision.main_dtype):
            if entry.is_elementwise:
                yield StateChunk(slot.name, entry.key, slot.shape, entry.value.dtype, param, False, _nothing)
            elif param.start == 0:  # one rank per parameter
                yield whole_entry(slot.name, entry.key, entry.of(()), False)

    def _state_of_wholes(self, shard: int) -> Iterator[StateEntry]:
        replicated, num_shards = self.training.plan.main is REPLICATED, self.training.topology.num_shards
        for of_stepper in by_stepper(self.training.wholes()).values():
            for number, one in enumerate(of_stepper):
                if shard == (number % num_shards if replicated else one.owner):
                    dtype, slot = one.unit.spec.precision.main_dtype, one.slot
                    for entry in self.needs.entries(slot.name, len(slot.shape), dtype):
                        yield whole_entry(slot.name, entry.key, entry.of(slot.shape), entry.is_elementwise)

    def _num_bytes_of_values(self) -> int:
        """Bytes of main or frozen weights, and of optimizer state, of all ranks together."""
        total = 0
        for unit in self.training.units:
            main = unit.spec.precision.main_dtype
            dtype = main if unit.spec.trainable else unit.spec.weight_dtype
            for slot in unit.layout.slots:
                total += slot.world.numel * dtype.itemsize
                if unit.spec.trainable:
                    is_whole = self.needs.is_whole(slot.name)
                    shape = slot.shape if is_whole else (slot.world.numel,)
                    total += sum(e.bytes_of(shape).sum for e in self.needs.entries(slot.name, len(shape), main))
        return total

    # The rest ------------------------------------------------------------------------------------------------------

    def _rest(self, rank: int) -> Iterator[Item]:
        for name, value in self.buffers.items() if rank == 0 else ():
            yield whole(f"model/{name}", value)
        random = EncodedState(f"rank/{rank}/random", random_state(), "random numbers")
        yield from random.items()
        yield blob(f"rank/{rank}/state", {"random": random.values})


def _is_counted(item: Item) -> bool:
    """Whether the item is counted by `_num_bytes_of_values`, or is a buffer."""
    return item.name.partition("/")[0] in ("model", "optimizer", "scalar")


def _nothing(interval: Interval) -> Tensor:
    raise AssertionError("nothing is written")

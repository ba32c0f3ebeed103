"""Plans the bytes of a checkpoint on disk: the ranks' files, their indices and the manifest, without any values.

The file of one rank is planned as by a save. What all ranks hold of a tensor, for the manifest, is computed from the
layout: the time does not depend on the number of shards. Random state is written as text, so that a file may differ by
a few bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from zeroshard.checkpoint.commit import entry_of, file_metadata
from zeroshard.checkpoint.contents import no_values, state_item
from zeroshard.checkpoint.folders import new_id
from zeroshard.checkpoint.manifest import Manifest, Run, TensorEntry, joined
from zeroshard.checkpoint.rank_state import EncodedState, blob, random_state, whole
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.layout.cuts import cut, sizes_for
from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import Slot
from zeroshard.placement import REPLICATED
from zeroshard.planned.parts import PlannedUnit
from zeroshard.planned.training import Training, by_stepper
from zeroshard.planning.optimizers import Needs
from zeroshard.step.stepper import StateChunk, StateEntry, whole_entry

FILES_PLANNED = 64
"""With more ranks, one rank's file is planned (under replicas one of the first replica and one of the second), and all
are assumed to have a header and an index as long."""


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
        """The bytes of all files and their indices; with more than FILES_PLANNED ranks, derived from the file of
        `rank`."""
        if self.num_ranks <= FILES_PLANNED:
            return sum(map(sum, self._sizes))
        num_shards = self.training.topology.num_shards
        of_each_replica = range(rank % num_shards, self.num_ranks, num_shards)
        replicas = [self._besides_values(one) for one in of_each_replica[:2]]
        buffers = sum(value.nbytes for value in self.buffers.values())
        # The first replica writes what is sharded, and the others are alike.
        besides = num_shards * replicas[0] + (self.num_ranks - num_shards) * replicas[-1]
        return besides + self._num_bytes_of_values() + buffers

    def _besides_values(self, rank: int) -> int:
        """Of the file of a rank and its index, the bytes that are neither values of parameters nor buffers."""
        file = self.file(rank)
        return file.num_bytes + file.index_bytes - sum(item.num_bytes for item in file.items if _is_counted(item))

    def manifest_bytes(self, rank: int) -> int:
        """The bytes of the manifest without hyper-parameters, `extra` and versions; with more than FILES_PLANNED ranks,
        with the sizes of the file of `rank` for all files."""
        sizes = self._sizes if self.num_ranks <= FILES_PLANNED else [_sizes_of(self.file(rank))] * self.num_ranks
        files = tuple(entry_of(number, *of_file) for number, of_file in enumerate(sizes))
        return len(Manifest(1, new_id(), files, dict(self._tensors()), {}, {}).encode())

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """Bytes of each rank's file, and of its index."""
        return [_sizes_of(self.file(rank)) for rank in range(self.num_ranks)]

    def file(self, rank: int) -> FilePlan:
        """The file of a rank of the world."""
        metadata = file_metadata(1, new_id(), rank)
        return FilePlan.of([*self._items(rank), *self._rest(rank)], metadata)

    # The manifest --------------------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors of the manifest, not in its order."""
        for unit in self.training.units:
            yield from self._tensors_of(unit)
        for shard, entry in self._wholes:
            yield _in_manifest(state_item(entry), (Run(shard, 0, 1),))
        rest = list(self._rest(0))
        for item in rest:
            _, _, name = item.name.partition("rank/0/")
            for rank in range(self.num_ranks) if name else (0,):
                of_rank = f"rank/{rank}/{name}" if name else item.name
                runs = (Run(rank, 0, item.interval.numel),) if item.interval else ()
                yield of_rank, TensorEntry(of_rank, item.shape, item.dtype, runs)

    def _tensors_of(self, unit: PlannedUnit) -> Iterator[tuple[str, TensorEntry]]:
        """The parameters of a unit, and that part of their state that is not stepped as a whole."""
        for slot in unit.layout.slots:
            runs, name = _runs_of(slot.world, unit.layout.shard_numel), f"model/{slot.name}"
            yield name, TensorEntry(name, slot.shape, unit.main_dtype, runs)
            if not slot.world or not unit.spec.trainable or self.needs.is_whole(slot.name):
                continue
            for entry in self._state_of(unit, slot, Interval(0, slot.world.numel)):
                yield _in_manifest(state_item(entry), runs)

    # What is sharded -----------------------------------------------------------------------------------------------

    def _items(self, rank: int) -> Iterator[Item]:
        replica, shard = divmod(rank, self.training.topology.num_shards)
        for unit in self.training.units if replica == 0 else ():
            for slot in unit.layout.slots if rank == 0 else ():
                if not slot.world:
                    yield Item(f"model/{slot.name}", slot.shape, unit.main_dtype, Interval(0, 0), no_values)
            for fragment in unit.layout.fragments(shard):
                slot = fragment.slot
                yield Item(f"model/{slot.name}", slot.shape, unit.main_dtype, fragment.param, no_values)
            if unit.spec.trainable:
                yield from map(state_item, self._state_in_pieces(unit, shard))
        if replica == 0:
            yield from map(state_item, self._state_of_wholes(shard))

    def _state_in_pieces(self, unit: PlannedUnit, shard: int) -> Iterator[StateEntry]:
        keys = [self.needs.key_of(slot.name) for slot in unit.layout.slots]
        piece_numel = sizes_for(self.training.topology.device_type).piece
        by_slot = unit.takes_over_gradients
        for world in cut(unit.layout, keys, unit.layout.shard(shard), piece_numel, by_slot=by_slot):
            for fragment in unit.layout.fragments_in(world):
                if not self.needs.is_whole(fragment.slot.name):
                    yield from self._state_of(unit, fragment.slot, fragment.param)

    def _state_of(self, unit: PlannedUnit, slot: Slot, param: Interval) -> Iterator[StateEntry]:
        for entry in self.needs.entries(slot.name, 1, unit.main_dtype):
            if entry.is_elementwise:
                yield StateChunk(slot.name, entry.key, slot.shape, entry.value.dtype, param, False, no_values)
            elif param.start == 0:  # one rank per parameter
                yield whole_entry(slot.name, entry.key, entry.of(()), False)

    def _state_of_wholes(self, shard: int) -> Iterator[StateEntry]:
        return (entry for owner, entry in self._wholes if owner == shard)

    @cached_property
    def _wholes(self) -> list[tuple[int, StateEntry]]:
        """State of parameters that are stepped as a whole: each entry with the shard that writes it."""
        return list(self._find_wholes())

    def _find_wholes(self) -> Iterator[tuple[int, StateEntry]]:
        replicated, num_shards = self.training.plan.main is REPLICATED, self.training.topology.num_shards
        for of_stepper in by_stepper(self.training.wholes()).values():
            for number, one in enumerate(of_stepper):
                owner = number % num_shards if replicated else one.owner
                dtype, slot = one.unit.main_dtype, one.slot
                for entry in self.needs.entries(slot.name, len(slot.shape), dtype):
                    yield owner, whole_entry(slot.name, entry.key, entry.of(slot.shape), entry.is_elementwise)

    def _num_bytes_of_values(self) -> int:
        """Bytes of main or frozen weights, and of optimizer state, of all ranks together."""
        total = 0
        for unit in self.training.units:
            for slot in unit.layout.slots:
                total += slot.world.numel * unit.main_dtype.itemsize
                if unit.spec.trainable:
                    shape = slot.shape if self.needs.is_whole(slot.name) else (slot.world.numel,)
                    entries = self.needs.entries(slot.name, len(shape), unit.main_dtype)
                    total += sum(entry.bytes_of(shape).sum for entry in entries)
        return total

    # The rest ------------------------------------------------------------------------------------------------------

    @cached_property
    def _random(self) -> dict[str, Any]:
        return random_state()

    def _rest(self, rank: int) -> Iterator[Item]:
        for name, value in self.buffers.items() if rank == 0 else ():
            yield whole(f"model/{name}", value)
        random = EncodedState(f"rank/{rank}/random", self._random, "random numbers")
        yield from random.items()
        yield blob(f"rank/{rank}/state", {"random": random.values})


def _sizes_of(file: FilePlan) -> tuple[int, int]:
    return file.num_bytes, file.index_bytes


def _is_counted(item: Item) -> bool:
    """Whether the item is counted by `_num_bytes_of_values`, or is a buffer."""
    return item.name.partition("/")[0] in ("model", "optimizer", "scalar")


def _in_manifest(item: Item, runs: tuple[Run, ...]) -> tuple[str, TensorEntry]:
    """The entry of a tensor. `runs`: of the parameter; a tensor that is not elementwise is whole in the first file."""
    if runs[-1].stop != item.interval.numel:
        runs = (Run(runs[0].file, 0, item.interval.numel),) if item.interval else ()
    return item.name, TensorEntry(item.name, item.shape, item.dtype, runs)


def _runs_of(world: Interval, shard: int) -> tuple[Run, ...]:
    """The shards that hold an interval of the full buffer, whose shards have `shard` elements."""
    if not world:
        return ()
    first, last = world.start // shard, (world.stop - 1) // shard
    if first == last:
        return (Run(first, 0, world.numel),)
    head, tail = (first + 1) * shard - world.start, world.stop - last * shard
    middle = (Run(first + 1, head, shard, last - first - 1),) if last > first + 1 else ()
    return joined([Run(first, 0, head), *middle, Run(last, world.numel - tail, tail)])

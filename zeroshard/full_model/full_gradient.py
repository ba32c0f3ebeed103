"""Reads and sets the reduced gradient of one parameter in full, between backward and step."""

from __future__ import annotations

from torch import Tensor, nn

from zeroshard.comm.same import expect_same
from zeroshard.errors import InvalidState, InvalidType, InvalidValue
from zeroshard.gradients.visible import doubtful
from zeroshard.placement import REPLICATED, SHARDED
from zeroshard.runtime.engine import Engine
from zeroshard.storage.gradients import Gradients, GradState
from zeroshard.storage.unit import Unit


def full_gradient(engine: Engine, name: str) -> Tensor:
    """See `Handle.gradient`."""
    unit, index, grads = _find(engine, name, "gradient")
    engine.reducer.visible.apply_clips()  # first: one that waits for its norm reduces what is set by hand
    own_term = engine.reducer.notice().get((unit.index, index))
    is_by_hand = engine.collectives.count(own_term is not None, "gradient") > 0
    _expect(engine, "gradient", name, grads, may_be_empty=is_by_hand)
    if is_by_hand:
        if engine.collectives.count(engine.reducer.visible.doubtful is not None, "gradient"):
            raise InvalidState(f"gradient: {doubtful(name)}")
        engine.reducer.reduce_by_hand({} if own_term is None else {(unit.index, index): own_term})
    own = unit.layout.slots[index].world & unit.own_shard()
    mean = unit.new_buffer(grads.buffer.dtype, SHARDED)
    grads.read(own, mean.own_part_of_full()[own.relative_to(unit.own_shard().start).slice])
    portions = unit.layout.portions({index})
    mean.redistribute(REPLICATED, engine.collectives, unit=unit.name, phase="unshard", portions=portions)
    mean.arrive()
    return mean.views()[index].div(engine.ledger.scale)


def set_full_gradient(engine: Engine, name: str, values: object) -> None:
    """See `Handle.set_gradient`."""
    unit, index, grads = _find(engine, name, "set_gradient")
    shape = unit.layout.slots[index].shape
    if not isinstance(values, Tensor):
        raise InvalidType(f"set_gradient: {name} takes a tensor, found an object of type {type(values).__name__}")
    if tuple(values.shape) != shape:
        raise InvalidValue(f"set_gradient: {name} has the shape {shape}, found {tuple(values.shape)}")
    engine.schedule.expect_to_begin()  # discards the gradients of a backward that has raised
    expect_same(engine.collectives, {name: values}, "set_gradient", "Pass the same on every rank: the mean over ranks")
    _expect(engine, "set_gradient", name, grads, may_be_empty=True)
    engine.reducer.set_gradient(unit, index, values)


def _expect(engine: Engine, what: str, name: str, grads: Gradients, *, may_be_empty: bool) -> None:
    """
    Raises:
        RuntimeError: on every rank: on one of them the gradient is not reduced. (Behind a backward under no_sync that
            left the parameter out on some ranks, it is partial on the others alone.)
    """
    is_fine = grads.state is GradState.REDUCED or (may_be_empty and grads.state is GradState.EMPTY)
    if engine.collectives.count(not is_fine, what):
        state = "not reduced on another rank" if is_fine else grads.state.value
        raise InvalidState(f"{what}: that of {name} is {state}; call backward (not under no_sync)")


def _find(engine: Engine, name: object, what: str) -> tuple[Unit, int, Gradients]:
    engine.expect_no_backward(what)  # whether a reduction is over there differs between ranks
    if not isinstance(name, str):
        found = f"an object of type {type(name).__name__}"
        if isinstance(name, nn.Parameter):
            more = ", values" if what == "set_gradient" else ""
            found = f"a parameter: write handle.{what}({engine.name_of(name)!r}{more})"
        raise InvalidType(f"{what} takes the name of a parameter, found {found}")
    for unit, grads in engine.reducer.grads.items():
        for index, slot in enumerate(unit.layout.slots):
            if slot.name == name:
                return unit, index, grads
    if (first := engine.tied().get(name)) is not None:
        return _find(engine, first, what)
    raise InvalidValue(f"{what}: the model has no trainable parameter of the name {name!r}")

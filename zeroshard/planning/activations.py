"""Plans activation memory: traces forward and backward of the user's model on fake tensors, which have no values.

Every storage that an operator creates is counted until the last reference to it is gone: tensors saved by autograd,
recomputed ones, gradients before they are in a bucket, and inputs. Memory that a kernel allocates and frees inside one
operator is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.errors import InvalidType, InvalidValue
from zeroshard.io.named import in_one_line
from zeroshard.model.casting import Cast, Precisions, Rules, attach_casts, casts_of
from zeroshard.model.paths import modules_of
from zeroshard.model.recomputing import recompute, worth_recomputing
from zeroshard.model.trees import tensors_in
from zeroshard.model.unit_spec import UnitSpec, plain_name
from zeroshard.planning.calls import Calls, Recorder
from zeroshard.planning.once import once
from zeroshard.planning.operators import AsOnGPUs, product_of_groups, without_autocast, without_onednn


@dataclass(frozen=True, eq=False)
class Workload:
    """One micro-batch of the user's training loop.

    Attributes:
        inputs: returns the inputs; it is called under fake tensors.
        loss: (model, inputs) -> the loss. Nothing in it may depend on values (`.item()`, `if loss > 3`).
        recompute: whether the modules that are units are called through `torch.utils.checkpoint`, where that saves
            memory (`recomputing.py`). Checkpointing inside the model is traced in any case.
        num_tokens: for the time model; 0: not known.

    Raises:
        TypeError: `inputs` or `loss` is not a function.
    """

    inputs: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    recompute: bool = False
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if not (callable(self.inputs) and callable(self.loss)):
            raise InvalidType(
                "Workload: expected two functions: inputs(), and loss(model, inputs); found a "
                f"{type(self.inputs).__name__} and a {type(self.loss).__name__}"
            )

    def trace(
        self, model: nn.Module, specs: Sequence[UnitSpec], precision: Precisions, device_type: str = "cpu"
    ) -> Trace:
        """The trace; in `traced_once` it is computed once for all precisions and units that make no difference to it.

        Raises:
            ValueError: it cannot be traced.
        """
        calls = tuple(dict.fromkeys(path for spec in specs for path in spec.calls))
        casts = casts_of(modules_of(model), Rules.of(precision), calls)
        dtypes = {plain_name(name): (spec.weight_dtype, spec.precision.grad) for spec in specs for name in spec.names}
        recomputed = worth_recomputing(model, calls) if self.recompute else ()
        key = "traces", frozenset(dtypes.items()), recomputed, device_type
        traced = once(key, (model, self.inputs, self.loss), list[_Traced])
        for one in traced:
            if one.is_that_of(casts):
                return one.trace
        traced.append(_trace(self, model, dtypes, casts, recomputed, device_type))
        return traced[-1].trace


class Gradient(NamedTuple):
    """Of the parameter `name`.

    Attributes:
        until: the most bytes since the previous gradient, up to this one.
        there: bytes when it has been computed, it included.
        own: bytes of its own.
    """

    name: str
    until: int
    there: int
    own: int


@dataclass(frozen=True)
class Trace:
    """Bytes held at once in one micro-batch; all numbers include the inputs.

    Attributes:
        inputs: of the inputs alone.
        forward: the most in forward.
        saved: at the end of forward.
        backward: the most in backward.
        modules: path of a module -> the bytes that its forward leaves.
        gradients: in the order of backward.
        rest: the most after the last gradient.
        calls: of the modules.
    """

    inputs: int
    forward: int
    saved: int
    backward: int
    modules: Mapping[str, int]
    gradients: tuple[Gradient, ...]
    rest: int
    calls: Calls = field(compare=False, repr=False)

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


class _Traced(NamedTuple):
    """A trace under these casts. `dtypes`: of the floating-point tensors that each module was called with, before they
    were cast."""

    casts: Mapping[nn.Module, Cast]
    dtypes: Mapping[nn.Module, Set[torch.dtype]]
    trace: Trace

    def is_that_of(self, casts: Mapping[nn.Module, Cast]) -> bool:
        """Whether it is the trace under those casts, too: where they differ, neither changes a tensor. (Units of other
        sizes cast the inputs of other modules, most of which have the dtype.)"""
        for module in casts.keys() | self.casts.keys():
            one, other = casts.get(module, Cast()), self.casts.get(module, Cast())
            into = {each.into for each in (one, other)} - {None} if one != other else set()
            if one.out != other.out or any(not self.dtypes.get(module, set()) <= {dtype} for dtype in into):
                return False
        return True


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Counts the bytes of storages that operators create while it is active. `now`: bytes of living storages; `most`:
    the most since the last `mark`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls: autograd asks each fake tensor for its device
            return type(args[0]).__torch_dispatch__(func, types, args, kwargs or {})
        result = self._results(func, args, kwargs or {})
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return result

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def note(self, tensor: Tensor, *, counted: bool = True) -> None:
        """Register a tensor's storage. `counted`: False: it is known, but not counted (a parameter)."""
        if tensor.layout is not torch.strided:  # the gradient of `nn.Embedding(sparse=True)`: its parts are known
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes() * counted
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))
            self.now += num_bytes
            self.most = max(self.most, self.now)

    def mark(self) -> int:
        """Return the most bytes since the last mark, and start again."""
        most, self.most = self.most, self.now
        return most

    def _gone(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.now -= num_bytes


class _LiveWithoutValues(Live):  # type: ignore[no-untyped-call]
    """Without values torch computes products of groups in bf16 alone; its kernels take other dtypes, too."""

    def _results(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return product_of_groups(*args, **kwargs)
        return func(*args, **kwargs)


def _trace(
    workload: Workload,
    model: nn.Module,
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]],
    casts: Mapping[nn.Module, Cast],
    recomputed: Iterable[str],
    device_type: str,
) -> _Traced:
    """`dtypes`: name of a parameter -> dtypes of its weight and gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    live, modules, gradients = _LiveWithoutValues(), dict[str, int](), list[Gradient]()
    recorder = Recorder(modules_of(model))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # On the CPU, as fake CUDA tensors need a torch with CUDA; the same operators run on the CPU.
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        fakes = stack.enter_context(_without_values(model, {name: dtype for name, (dtype, _) in dtypes.items()}, mode))
        for remove in attach_casts(casts):
            stack.callback(remove)
        for path in recomputed:
            stack.callback(recompute(model.get_submodule(path)))
        if device_type != "cpu":
            stack.enter_context(AsOnGPUs())
            stack.enter_context(without_autocast(device_type))
        stack.enter_context(without_onednn())
        seen = stack.enter_context(_measured(model, live, modules, recorder))
        stack.enter_context(live)
        for buffer in model.buffers():
            live.note(buffer, counted=False)  # an operator that changes it in place returns it
        for name, parameter in fakes.items():
            live.note(parameter, counted=False)
            _collect(parameter, name, live, gradients, dtypes[name][1] if name in dtypes else None)
        stack.enter_context(_converted_to_what_they_are(model))
        stack.enter_context(_others_frozen())
        with in_one_line("activations: the inputs of one micro-batch", InvalidValue):
            inputs = workload.inputs()
        of_inputs = live.now
        run = f"activations: the model and its loss, run without values on {_in_words(inputs)}"
        with in_one_line(run, InvalidValue), _values_are_asked_for():
            loss = workload.loss(model, inputs)
            forward = live.mark()
            gc.collect()  # what is in a cycle of references (a cache of keys) goes now, and not when Python happens to
            saved = live.now
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
                raise InvalidValue(f"activations: the loss must be a tensor with one element, found {shape}")
            # Not `loss.backward()`: torch leaves `AsOnGPUs` for such a call, and what is recomputed in it would run as
            # on a CPU.
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        rest = live.mark()
        backward = max([rest, *(gradient.until for gradient in gradients)])
    trace = Trace(of_inputs, forward, saved, backward, modules, tuple(gradients), rest, recorder.calls)
    return _Traced(casts, seen, trace)


@contextmanager
def _others_frozen() -> Iterator[None]:
    """A scope in which a garbage collection looks at what has been made inside it, and not at all that the program
    holds: seconds for each trace in a large one."""
    if gc.get_freeze_count():  # the program has frozen what it holds, and what is frozen is thawed as a whole
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _without_values(
    model: nn.Module, dtypes: Mapping[str, torch.dtype], mode: Any
) -> Iterator[dict[str, nn.Parameter]]:
    """A scope in which parameters (in these dtypes) and buffers are fake tensors. Yields the parameters by name."""
    fakes: dict[int, Any] = {}
    named: dict[str, nn.Parameter] = {}
    with _left_as_they_are(model):
        for path, module in model.named_modules():
            for kind in (module._parameters, module._buffers):
                for name, tensor in kind.items():
                    if tensor is None:
                        continue
                    full_name = plain_name(f"{path}.{name}" if path else name)
                    if id(tensor) not in fakes:
                        dtype = dtypes.get(full_name, tensor.dtype)
                        fake: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
                        if isinstance(tensor, nn.Parameter):
                            fake = named[full_name] = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        fakes[id(tensor)] = fake
                    kind[name] = fakes[id(tensor)]
            for name, value in vars(module).items():  # a table that is no buffer
                if isinstance(value, Tensor) and value.is_meta:
                    vars(module)[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        yield named


@contextmanager
def _left_as_they_are(model: nn.Module) -> Iterator[None]:
    """A scope at whose end modules have the attributes, parameters, buffers and modules from before. A forward may keep
    tensors (a table of rotary positions), which have no values here."""
    dicts: list[dict[str, Any]] = []
    for module in model.modules():
        dicts += vars(module), module._parameters, module._buffers, module._modules
    before = [dict(one) for one in dicts]
    try:
        yield
    finally:
        for one, entries in zip(dicts, before, strict=True):
            one.clear()
            one.update(entries)


def _in_words(inputs: Any) -> str:
    """The shapes and dtypes of the inputs, for a message."""
    named = inputs.items() if isinstance(inputs, Mapping) else [("a tensor", leaf) for leaf in tree_leaves(inputs)]
    found = [f"{name} {[*leaf.shape]} {leaf.dtype}" for name, leaf in named if isinstance(leaf, Tensor)]
    return ", ".join(found) or f"{inputs!r:.80}"


@contextmanager
def _values_are_asked_for() -> Iterator[None]:
    """
    Raises:
        ValueError: code inside depends on values; the message says what to do.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidValue(
            f"activations: one micro-batch cannot be traced without values: {error.func} depends on them (`.item()`, "
            "`if x.sum() > 0`, or a mixture of experts that calls each expert with its own tokens). Plan a variant "
            "that does not, or without a batch"
        ) from error


@contextmanager
def _converted_to_what_they_are(model: nn.Module) -> Iterator[None]:
    """A scope in which modules may convert themselves to the dtype that they have, as routers that compute in fp32 do.
    Without values torch converts no parameter, not even so."""

    def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for one in module.modules() if recurse else [module]:
            for name, parameter in one._parameters.items():
                if parameter is not None and (to := fn(parameter)) is not parameter:
                    kind = type(one).__name__
                    raise InvalidValue(
                        f"activations: the {name} of a {kind} is converted in a forward to {to.dtype}, which shard() "
                        "refuses, too: keep the module that does so in this dtype from the start, by "
                        "precision=MixedPrecision(keep=(TheModule,))"
                    )
            one._buffers.update(
                {name: buffer if buffer is None else fn(buffer) for name, buffer in one._buffers.items()}
            )
        return module

    modules: list[Any] = list(model.modules())
    for module in modules:
        module._apply = partial(convert, module)
    try:
        yield
    finally:
        for module in modules:
            del module._apply


@contextmanager
def _measured(
    model: nn.Module, live: Live, found: dict[str, int], recorder: Recorder
) -> Iterator[dict[nn.Module, set[torch.dtype]]]:
    """A scope that records in `found` the bytes that the first forward of each module leaves, and the calls. Yields the
    dtypes of the inputs of each module."""
    handles, open_calls, dtypes = [], dict[str, int](), dict[nn.Module, set[torch.dtype]]()

    def begin(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found_in = dtypes.setdefault(module, set())
        found_in.update(one.dtype for one in tensors_in((args, kwargs)) if one.is_floating_point())
        if path not in found:
            open_calls.setdefault(path, live.now)
        recorder.begin(module, (args, kwargs))

    def end(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorder.end(module, (args, kwargs), output)
        if path in open_calls:
            found[path] = live.now - open_calls.pop(path)

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begin, path), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(end, path), with_kwargs=True, always_call=True))
    try:
        yield dtypes
    finally:
        for handle in handles:
            handle.remove()


def _collect(parameter: nn.Parameter, name: str, live: Live, found: list[Gradient], dtype: torch.dtype | None) -> None:
    """Free the gradient as soon as it has been computed, as the engine moves it into its bucket."""
    if not parameter.requires_grad:
        return
    if dtype is not None and dtype.itemsize > parameter.element_size():
        parameter.grad_dtype = dtype

    def take(one: Tensor) -> None:
        there, own = live.now, 0
        if one.grad is not None and one.grad.layout is torch.strided:  # a sparse one is not taken over
            own = one.grad.untyped_storage().nbytes()
        one.grad = None
        found.append(Gradient(name, live.mark(), there, own))

    parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

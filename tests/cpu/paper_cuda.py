"""CUDA on paper: tensors that say that they are on a GPU and compute on the CPU.

``paper_process.py`` starts a process that can have them. Within ``paper_cuda()``:

- What is made on ``cuda`` or moved there is a :class:`PaperTensor`, around a tensor of the CPU.
- An operation on tensors of both devices raises :class:`MixedDevicesError`, as a GPU would.
- Copies to main memory that the host does not wait for have not arrived until it does wait.
- A :class:`Record` counts kernel launches, and the places where the host waits for the GPU, by file and line of the project.

Kernels, streams, memory and NCCL do not exist here. gloo does what NCCL would.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

CUDA = torch.device("cuda", 0)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the GPU and of the CPU."""


class MatrixOfScoresError(RuntimeError):
    """Attention would keep the scores of all pairs of tokens on the GPU."""


@dataclass
class Record:
    """What was asked of the GPU.

    Attributes:
        launches: of kernels, by operation.
        waits: of the host until the GPU has done all that was queued, by what was called and by which of our functions.
        uploads: copies to the GPU that it makes by itself, likewise.
        locked: bytes of main memory that became readable for the GPU, which takes the host a while, by thread.
        emptied: how often each of our functions gave the GPU's free memory back to other processes.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    locked: Counter[str] = field(default_factory=Counter)
    emptied: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        for counter in (self.launches, self.waits, self.uploads, self.locked, self.emptied):
            counter.clear()


RECORD = Record()
REGISTERED: dict[int, int] = {}  # memory that a GPU copies by itself: its bytes by its address
PINNED: list[torch.Tensor] = []
LATE: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # copies to main memory that the GPU makes by itself: to, from
PACKAGE = "/skyrl_train/"
# Operations without a kernel.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "lift_fresh",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
}  # fmt: skip
# The shape or the value of their result depends on the GPU's numbers, so the host waits for it.
WAITING = {
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_dim",
}  # fmt: skip
COPIES = {"_to_copy", "copy_", "copy", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def caller() -> str:
    """Return the innermost line of the project on the stack."""
    frame = sys._getframe()
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition(PACKAGE)
        if found and "site-packages" not in frame.f_code.co_filename:
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


def _wait(what: str) -> None:
    """The host waits until the GPU has done all that was queued."""
    RECORD.waits[f"{what} @ {caller()}"] += 1
    _arrive()


def _arrive() -> None:
    while LATE:
        memory, numbers = LATE.popleft()
        memory.copy_(numbers)


class PaperTensor(torch.Tensor):
    """Says that it is on ``cuda:0``; ``elem`` has its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor, requires_grad: bool = False) -> PaperTensor:
        assert type(elem) is not PaperTensor and elem.device.type == "cpu"
        like = {"dtype": elem.dtype, "layout": elem.layout, "device": CUDA, "requires_grad": requires_grad}
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), **like
        )

    def __init__(self, elem: torch.Tensor, requires_grad: bool = False) -> None:
        self.elem = elem

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> PaperTensor:
        return PaperTensor(inner["elem"])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PaperTensor({self.elem!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        _wait("tolist")
        return self.elem.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {caller()}")

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()  # FSDP2 frees and takes memory by resizing it


class Paper(TorchDispatchMode):
    """Sees what makes tensors on the GPU, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        if any(type(each) not in (torch.Tensor, torch.nn.Parameter, PaperTensor) for each in tensors):
            return NotImplemented  # a DTensor, which asks for operations on its parts
        device = kwargs.get("device")
        if any(isinstance(each, PaperTensor) for each in tensors) or (device and torch.device(device).type == "cuda"):
            return compute(func, args, kwargs)
        if func is torch.ops.aten.is_pinned.default:
            return is_pinned(args[0])
        if func is torch.ops.aten._pin_memory.default:
            return _pin(args[0].clone())
        pinned = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        return _pin(result) if pinned else result


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a GPU can copy this memory by itself."""
    address = tensor.data_ptr()
    return any(start <= address < start + size for start, size in REGISTERED.items())


def _lock(address: int, size: int) -> None:
    REGISTERED[address] = size
    RECORD.locked[threading.current_thread().name] += size


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    _lock(tensor.data_ptr(), tensor.nbytes)
    PINNED.append(tensor)  # kept, so that no other memory gets its address
    return tensor


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the CPU as the GPU would: refuse, count, and return results that say where they are."""
    name = func._schema.name.partition("::")[2]
    flat, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, PaperTensor)]
    on_cpu = [each for each in tensors if not isinstance(each, PaperTensor) and not each.is_meta]
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    makes_gpu = wanted.type == "cuda" if wanted is not None else bool(on_gpu)
    copies = name in COPIES
    if on_gpu and not copies and name != "set_":
        mixed = [each for each in on_cpu if each.dim()]  # a scalar is an argument of the kernel
        if name in INDEXING and isinstance(args[0], PaperTensor):  # torch copies indices by itself
            indices = [each for each in mixed if each.dtype in (torch.int64, torch.bool, torch.uint8)]
            mixed = [each for each in mixed if each.dtype not in (torch.int64, torch.bool, torch.uint8)]
            for index in indices:
                _count_upload(index, non_blocking=False)
        if mixed:
            shapes = [[tuple(each.shape) for each in of] for of in (on_gpu, mixed)]
            raise MixedDevicesError(f"{func} at {caller()}: {shapes[0]} on cuda and {shapes[1]} on the CPU")
    _count(name, args, kwargs, on_gpu, makes_gpu)
    inner_args, inner_kwargs = tree_unflatten(
        [getattr(each, "elem", each) if isinstance(each, PaperTensor) else each for each in flat], spec
    )
    if wanted is not None:
        inner_kwargs["device"] = torch.device("cpu")
    pinned = inner_kwargs.pop("pin_memory", None)
    if name == "copy_" and not isinstance(args[0], PaperTensor) and _non_blocking(args, kwargs) and is_pinned(args[0]):
        LATE.append((args[0], inner_args[1].clone()))
        return args[0].zero_()  # until the host has waited
    result = func(*inner_args, **inner_kwargs)
    if name == "copy_":
        return args[0]
    if not makes_gpu:
        return _pin(result) if pinned else result
    known = {id(each.elem): each for each in on_gpu}

    def wrap(each: torch.Tensor) -> PaperTensor:
        return known[id(each)] if id(each) in known else PaperTensor(each)

    wrapped = tree_map_only(torch.Tensor, wrap, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_gpu and func.namespace == "aten" else wrapped


def _count(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], on_gpu: Sequence[PaperTensor], makes_gpu: bool
) -> None:
    if name not in VIEWS and name != "_local_scalar_dense":
        RECORD.launches[name] += 1
    by_mask = name == "index" and any(
        isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in tree_flatten(args[1])[0]
    )
    if on_gpu and (name in WAITING or by_mask):
        _wait(name)
    if name == "_to_copy":
        from_gpu = isinstance(args[0], PaperTensor)
        if from_gpu and not makes_gpu and not kwargs.get("non_blocking"):  # such a copy goes to pinned memory
            _wait("to the CPU")
        if not from_gpu and makes_gpu:
            _count_upload(args[0], kwargs.get("non_blocking", False))
    if name == "copy_":
        to_gpu, from_gpu = (isinstance(each, PaperTensor) for each in args[:2])
        non_blocking = _non_blocking(args, kwargs)
        if from_gpu and not to_gpu and not (non_blocking and is_pinned(args[0])):
            _wait("copy_ to the CPU")
        if to_gpu and not from_gpu:
            _count_upload(args[1], non_blocking)


def _non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _count_upload(source: torch.Tensor, non_blocking: bool) -> None:
    if non_blocking and is_pinned(source):
        RECORD.uploads[f"copy @ {caller()}"] += 1
        _arrive()  # in the order of the stream
    elif source.dim():  # the value of a scalar travels with the kernel
        _wait("copy from pageable memory")


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None

    def synchronize(self) -> None:
        _wait("stream.synchronize")

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None

    def synchronize(self) -> None:
        _wait("event.synchronize")


@dataclass(frozen=True)
class _Properties:
    uuid: str = "GPU-paper"
    name: str = "Paper H100"
    total_memory: int = 80 << 30
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132


def _synchronize(*_: Any) -> None:
    _wait("cuda.synchronize")


def _empty_cache() -> None:
    RECORD.emptied[caller()] += 1


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    """Refuse what only the kernel that keeps a matrix of scores for each head would compute on a GPU."""
    if query.is_cuda and key.shape[1] < query.shape[1]:
        raise MatrixOfScoresError(f"{query.shape[1]} heads share those of {key.shape[1]} keys, at {caller()}")
    return scaled_dot_product_attention(query, key, value, **how)


class _CudaRuntime:
    """Registers memory, as ``torch.cuda.cudart()``."""

    cudaError = mock.Mock(success=0)

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        _lock(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del REGISTERED[address]
        return 0


_NOTHING = lambda *_, **__: None  # noqa: E731
TORCH_CUDA: Mapping[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": _NOTHING,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _NOTHING,
    "device": lambda *_: contextlib.nullcontext(),
    "synchronize": _synchronize,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda *_: contextlib.nullcontext(),
    "cudart": _CudaRuntime,
    "empty_cache": _empty_cache,
    "manual_seed": _NOTHING,
    "manual_seed_all": _NOTHING,
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": _NOTHING,
    "get_device_properties": lambda *_: _Properties(),
    "get_device_capability": lambda *_: (9, 0),
    "get_device_name": lambda *_: "Paper H100",
    "is_bf16_supported": lambda *_: True,
    "mem_get_info": lambda *_: (70 << 30, 80 << 30),
}


@contextlib.contextmanager
def paper_cuda() -> Iterator[Record]:
    """Let this process have a GPU on paper. Yields an empty record."""
    RECORD.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(PINNED.clear)
        stack.callback(LATE.clear)
        stack.callback(REGISTERED.clear)
        for name, value in TORCH_CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # The head's kernels need a real GPU.
        stack.enter_context(mock.patch("skyrl_train.training.head.find_spec", return_value=None))
        stack.enter_context(mock.patch("skyrl_train.training.attention.scaled_dot_product_attention", _attend))
        stack.enter_context(Paper())
        yield RECORD

"""PyTorch's tensors: which are taken and how, results in tensors, and its streams and events."""

from __future__ import annotations

import gc
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import assert_same_bits, sample
from flavours import missing
from ncclcomm.arrays import HOST_MEMORY, check_out, empty_on, kind_named, view
from ncclcomm.devices import use_backend
from ncclcomm.devices.foreign_torch import TORCH
from ncclcomm.devices.host import HostBackend
from ncclcomm.devices.host_array import HostArray
from ncclcomm.errors import ArgumentError, BackendUnavailableError, UnsupportedError

PLAIN = ["bool", "uint8", "int8", "int16", "int32", "int64"]
PLAIN += ["float16", "float32", "float64", "complex64", "complex128"]
LATER = ["uint16", "uint32", "uint64"]
OF_ML_DTYPES = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@pytest.fixture(scope="module")
def torch() -> Any:
    """PyTorch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of its own import is not about ncclcomm
            import torch
    except ModuleNotFoundError:
        missing("torch", "no PyTorch here; pip install torch (a build for the CPU will do)", ci_has_it=False)
    return torch


@pytest.fixture(params=["host-sync", "host-async"])
def backend(request: pytest.FixtureRequest) -> Iterator[HostBackend]:
    """Three virtual devices."""
    with use_backend(HostBackend(3, immediate=request.param == "host-sync")) as chosen:
        assert isinstance(chosen, HostBackend)
        yield chosen


def bits_of(torch: Any, tensor: Any) -> bytes:
    """A tensor's elements in C order."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def tensor_of(torch: Any, name: str, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of random bits."""
    dtype = getattr(torch, name)
    size = torch.empty((), dtype=dtype).element_size()
    flat = sample("?" if name == "bool" else "u1", int(np.prod(shape)) * size, seed)
    return torch.from_numpy(flat).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", [*PLAIN, *LATER, *OF_ML_DTYPES])
def test_every_dtype_shares_its_memory(torch: Any, name: str) -> None:
    tensor = tensor_of(torch, name, (3, 4), 1)
    found = view(tensor, "call: x")
    assert found.obj is tensor
    assert (found.device, found.kind) == (HOST_MEMORY, TORCH)
    assert type(found.data) is np.ndarray
    assert (found.data.dtype.name, found.data.shape) == (name, (3, 4))
    assert found.data.tobytes() == bits_of(torch, tensor)
    found.data[1, 2] = found.data[0, 0]
    assert found.data.tobytes() == bits_of(torch, tensor)
    assert found.data.__array_interface__["data"][0] == tensor.data_ptr()


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "columns": lambda t: t[:, 1::2],
    "Fortran": lambda t: t.T,
    "offset": lambda t: t[2:],
    "repeated": lambda t: t[:1].expand(5, 6),
    "one element": lambda t: t[2, 3],
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[:, :0],
}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(torch: Any, layout: str, name: str) -> None:
    tensor = LAYOUTS[layout](tensor_of(torch, name, (4, 6), 2))
    data = view(tensor, "call: x").data
    assert data.shape == tuple(tensor.shape)
    if data.size:
        assert data.strides == tuple(step * data.itemsize for step in tensor.stride())
    assert data.tobytes() == bits_of(torch, tensor)


def test_a_view_keeps_the_memory(torch: Any) -> None:
    tensor = torch.arange(6.0)
    watched = weakref.ref(tensor)
    data = view(tensor, "call: x").data
    del tensor
    gc.collect()
    assert data.tolist() == [0, 1, 2, 3, 4, 5]
    del data
    gc.collect()
    assert watched() is None


def test_what_autograd_follows_is_refused_while_it_does(torch: Any) -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    for tensor in (leaf, leaf * 2, (leaf * 2)[1:]):
        with pytest.raises(UnsupportedError, match=r"^call: x: the tensor requires grad.*\.detach\(\).*no_grad"):
            view(tensor, "call: x")
        assert view(tensor.detach(), "call: x").data.__array_interface__["data"][0] == tensor.data_ptr()
        with torch.no_grad():
            found = view(tensor, "call: x")
        assert found.obj is tensor
        assert found.data.__array_interface__["data"][0] == tensor.data_ptr()


def masked(torch: Any) -> Any:
    """A tensor with a mask."""
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def freed(torch: Any) -> Any:
    """A tensor whose storage was freed, as FSDP does."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(torch: Any) -> Any:
    """A tensor of torch.compile's, which has a shape and no elements."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sparse": (lambda t: t.eye(2).to_sparse(), "the tensor has the layout torch.sparse_coo; pass tensor.to_dense()"),
    "compressed": (lambda t: t.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr"),
    "onednn": (lambda t: t.ones(2).to_mkldnn(), "has the layout torch._mkldnn"),
    "nested": (lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]), "is nested; pass its parts"),
    "jagged": (
        lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)], layout=t.jagged),
        "NestedTensor is made of other tensors",
    ),
    "meta": (lambda t: t.ones(2, device="meta"), "is on meta; supported are the CPU's and CUDA's tensors"),
    "quantized": (
        lambda t: t.quantize_per_tensor(t.ones(2), 1.0, 0, t.quint8),
        "NumPy has no dtype for torch.quint8; pass tensor.int_repr()",
    ),
    "conjugate": (lambda t: t.ones(2, dtype=t.complex64).conj(), "a conjugate that was not computed; pass tensor.reso"),
    "negative": (lambda t: t.ones(2, dtype=t.complex64).conj().imag, "pass tensor.resolve_neg()"),
    "zero": (lambda t: t._efficientzerotensor(3), "all its elements are 0; pass tensor.clone()"),
    "complex32": (lambda t: t.zeros(2, dtype=t.complex32), "NumPy has no dtype for torch.complex32; pass the bits"),
    "float4": (lambda t: t.zeros(2, dtype=t.uint8).view(t.float4_e2m1fn_x2), "no dtype for torch.float4_e2m1fn_x2"),
    "masked": (masked, "MaskedTensor is made of other tensors; pass a plain one"),
    "fake": (fake, "FakeTensor is made of other tensors"),
    "freed": (freed, "has no memory: its storage was resized or freed"),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of what is experimental or on its way out
@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_plain_memory_is_refused(torch: Any, kind: str) -> None:
    make, words = REFUSED[kind]
    try:
        tensor = make(torch)
    except (AttributeError, ImportError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this PyTorch has no such tensor: {error}")
    with pytest.raises(UnsupportedError, match=f"^call: x: .*{re.escape(words)}"):
        view(tensor, "call: x")


def test_inside_a_transform_of_functions(torch: Any) -> None:
    def per_row(row: Any) -> Any:
        with pytest.raises(UnsupportedError, match="^call: x: the tensor .*doesn't have storage"):
            view(row, "call: x")
        return row

    torch.vmap(per_row)(torch.ones(2, 3))


def test_subclasses_that_are_plain_memory(torch: Any) -> None:
    class Labelled(torch.Tensor):  # type: ignore[misc, name-defined]
        """A subclass whose functions give something else."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    tensor = torch.arange(3.0)
    labelled = tensor.as_subclass(Labelled)
    found = view(labelled, "call: x")
    assert found.obj is labelled
    assert found.data.__array_interface__["data"][0] == tensor.data_ptr()


def test_ml_dtypes_is_asked_for(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclcomm.devices.foreign_torch._known", {})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendUnavailableError, match="call: x: tensors of bfloat16 need ml_dtypes: pip install ml_dt"):
        view(torch.ones(2, dtype=torch.bfloat16), "call: x")


@pytest.mark.parametrize("name", [*PLAIN, *LATER, *OF_ML_DTYPES])
def test_results_are_tensors_of_the_same_dtype(torch: Any, backend: HostBackend, name: str) -> None:
    dtype = getattr(torch, name)
    wanted = view(torch.zeros(2, dtype=torch.uint8).to(dtype), "x").data.dtype
    for shape in ((2, 3), (), (0, 4)):
        found = empty_on(backend, shape, wanted, HOST_MEMORY, TORCH)
        assert type(found.obj) is torch.Tensor
        assert (found.obj.dtype, tuple(found.obj.shape), found.obj.device.type) == (dtype, shape, "cpu")
        assert found.obj.is_contiguous()
        assert not found.obj.requires_grad
        assert (found.data.dtype, found.data.shape, found.device, found.kind) == (wanted, shape, HOST_MEMORY, TORCH)
        found.data[...] = np.ones((), wanted)
        assert bits_of(torch, found.obj) == np.ones(shape, wanted).tobytes()


def test_results_where_pytorch_has_none(torch: Any, backend: HostBackend) -> None:
    found = empty_on(backend, (2,), np.dtype("f4"), 1, TORCH)
    assert (type(found.obj), found.device, found.kind) == (HostArray, 1, None)
    for dtype in ("M8[s]", ">f4", [("a", "i4")]):
        found = empty_on(backend, (2,), np.dtype(dtype), HOST_MEMORY, TORCH)
        assert (type(found.obj), found.kind) == (np.ndarray, None)


def test_results_under_pytorchs_default_device(torch: Any, backend: HostBackend) -> None:
    with torch.device("meta"):
        found = empty_on(backend, (2,), np.dtype("f4"), HOST_MEMORY, TORCH)
    assert found.obj.device.type == "cpu"


def test_autograd_hears_of_an_array_to_be_filled(torch: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    factor = torch.full((3,), 2.0)
    product = (leaf * factor).sum()  # backward needs factor
    out = view(factor, "out")
    check_out(out, (3,), np.dtype("f4"), "call: out")
    out.data[...] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_bad_and_inference_outs(torch: Any) -> None:
    with torch.inference_mode():
        made = torch.zeros(3)
    check_out(view(made, "out"), (3,), np.dtype("f4"), "call: out")
    with pytest.raises(ArgumentError, match="share memory"):
        check_out(view(torch.zeros(1).expand(3), "out"), (3,), np.dtype("f4"), "call: out")
    tensor = torch.zeros(6)
    with pytest.raises(ArgumentError, match="^call: out overlaps an input"):
        check_out(view(tensor[:3], "out"), (3,), np.dtype("f4"), "call: out", [view(tensor[1:4], "x")])
    check_out(view(tensor, "out"), (6,), np.dtype("f4"), "call: out", [view(tensor.numpy(), "x")], alias_ok=True)


def test_of_another_rank(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_named("torch", HOST_MEMORY) is TORCH
    assert kind_named(None, HOST_MEMORY) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert kind_named("torch", HOST_MEMORY) is None


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_to_our_own_arrays(torch: Any, backend: HostBackend, name: str) -> None:
    tensor = tensor_of(torch, name, (4, 3), 3).T
    expected = view(tensor, "x").data.copy()
    there = ncclcomm.asarray(tensor, device=2)
    assert (type(there), ncclcomm.device_index(there)) == (HostArray, 2)
    assert_same_bits(ncclcomm.to_numpy(there), expected)
    here = ncclcomm.asarray(tensor, device="cpu")
    assert type(here) is np.ndarray
    assert here.__array_interface__["data"][0] == tensor.data_ptr()
    found = ncclcomm.to_numpy(tensor)
    assert_same_bits(found, expected)
    assert not np.shares_memory(found, here)
    assert ncclcomm.device_index(tensor) == -1
    assert ncclcomm.array_module(tensor) is torch


def test_to_our_own_arrays_of_another_dtype(torch: Any, backend: HostBackend) -> None:
    tensor = torch.tensor([1.5, -2.0])
    for device in ("cpu", 1):
        made = ncclcomm.asarray(tensor, device, "f8")
        assert_same_bits(ncclcomm.to_numpy(made), np.array([1.5, -2.0]))
    assert tensor.tolist() == [1.5, -2.0]


def test_device_objects(torch: Any, backend: HostBackend) -> None:
    with ncclcomm.device(torch.device("cuda", 2)):
        assert ncclcomm.current_device() == 2
        with ncclcomm.device_of(torch.ones(2)):
            assert ncclcomm.current_device() == 2
    assert type(ncclcomm.asarray([1.0], device=torch.device("cpu"))) is np.ndarray


class FakeGpus(HostBackend):
    """Virtual devices that pass for GPUs."""

    name = "cuda"

    def __init__(self, namespace: Any = None) -> None:
        super().__init__(3, immediate=False)
        self._namespace = namespace
        self.of_others: dict[int, Any] = {}
        self.create_stream(0, 0)  # handle 1, which on GPUs is the default stream

    def external_stream(self, handle: int, device: int) -> Any:
        """A stream of another library, one of ours in truth."""
        found = self.of_others[handle]
        assert found.device == device
        return found

    def array_namespace(self) -> Any:
        """In CuPy's place."""
        return self._namespace


class FakeCuda(ModuleType):
    """In the place of torch.cuda, with streams of FakeGpus."""

    class Stream:
        """A stream by its handle and device."""

        def __init__(self, cuda_stream: int, device: int) -> None:
            self.cuda_stream = cuda_stream
            self.device = type("device", (), {"index": device, "type": "cuda"})()

    class Event:
        """Keeps what it is asked."""

        device: Any = None

        def __init__(self) -> None:
            self.asked: list[tuple[str, Any, Any]] = []

        def record(self, stream: Any) -> None:
            self.device = stream.device
            self.asked.append(("record", stream.cuda_stream, stream.device.index))

        def wait(self, stream: Any) -> None:
            self.asked.append(("wait", stream.cuda_stream, stream.device.index))

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current: dict[int, int] = {}

    def ExternalStream(self, handle: int, device: int) -> Any:  # noqa: N802
        """As torch.cuda.ExternalStream."""
        return self.Stream(handle, device)

    def default_stream(self, device: int) -> Any:
        """As torch.cuda.default_stream."""
        return self.Stream(0, device)

    def current_stream(self, device: int) -> Any:
        """As torch.cuda.current_stream."""
        return self.Stream(self.current.get(device, 0), device)


class FakeTorch(ModuleType):
    """In the place of torch, with tensors on GPUs."""

    strided = object()

    class Tensor:
        """A tensor at an address that nobody reads."""

        is_cuda, requires_grad, is_nested, is_quantized = True, False, False, False
        dtype = "torch.float32"
        device = type("device", (), {"type": "cuda", "index": 1})()

        def __init__(self, shape: tuple[int, ...], steps: tuple[int, ...] | None = None, pointer: int = 4096) -> None:
            self.layout = FakeTorch.strided
            self.shape, self._steps, self._pointer = shape, steps, pointer
            self.recorded: list[Any] = []

        def _no(self) -> bool:
            return False

        is_conj = is_neg = _is_zerotensor = _no

        def is_contiguous(self) -> bool:
            return self._steps is None

        def stride(self) -> Any:
            return self._steps

        def numel(self) -> int:
            return int(np.prod(self.shape))

        def data_ptr(self) -> int:
            return self._pointer

        def get_device(self) -> int:
            return 1

        def record_stream(self, stream: Any) -> None:
            self.recorded.append(stream.cuda_stream)

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = FakeCuda()

    def is_grad_enabled(self) -> bool:
        return True


class FakeCuPy:
    """In CuPy's place: arrays say what they were made of."""

    class cuda:  # noqa: N801
        """Memory."""

        @staticmethod
        def UnownedMemory(*args: Any) -> Any:  # noqa: N802
            return args

        @staticmethod
        def MemoryPointer(*args: Any) -> Any:  # noqa: N802
            return args

    class ndarray:  # noqa: N801
        """An array by what it was made of."""

        def __init__(self, shape: Any, dtype: Any, pointer: Any, strides: Any) -> None:
            self.shape, self.dtype, self.strides = shape, dtype, strides
            (self.address, self.nbytes, self.owner, self.device_id), self.offset = pointer


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeGpus, Any]]:
    """Devices that pass for GPUs, and a PyTorch on them."""
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("ncclcomm.devices.foreign_torch._known", {})
    monkeypatch.setattr("ncclcomm.devices.foreign_torch._made", {})
    backend = FakeGpus(FakeCuPy)
    with use_backend(backend):
        yield backend, torch


def side_stream(backend: FakeGpus, torch: Any, device: int, *, current: bool = True) -> Any:
    """A stream of PyTorch's."""
    own = backend.create_stream(device, 0)
    backend.of_others[own.handle] = own
    if current:
        torch.cuda.current[device] = own.handle
    return torch.cuda.Stream(own.handle, device)


@pytest.mark.parametrize(
    ("shape", "steps", "nbytes"),
    [
        ((3, 4), None, 48),
        ((), None, 4),
        ((0, 4), None, 0),
        ((3, 2), (8, 2), 4 * (2 * 8 + 1 * 2 + 1)),
        ((3, 4), (0, 1), 16),
    ],
    ids=str,
)
def test_memory_of_a_gpu(gpus: Any, shape: Any, steps: Any, nbytes: int) -> None:
    tensor = gpus[1].Tensor(shape, steps)
    found = view(tensor, "call: x")
    data = found.data
    assert (found.obj, found.device, found.kind) == (tensor, 1, TORCH)
    assert (data.shape, data.dtype, data.address, data.nbytes) == (shape, np.dtype("f4"), 4096, nbytes)
    assert (data.owner, data.device_id, data.offset) == (tensor, 1, 0)
    assert data.strides == (None if steps is None else tuple(4 * step for step in steps))


def test_freed_memory_of_a_gpu(gpus: Any) -> None:
    with pytest.raises(UnsupportedError, match="^call: x: the tensor has no memory: its storage was resized or freed"):
        view(gpus[1].Tensor((3,), pointer=0), "call: x")
    assert view(gpus[1].Tensor((0,), pointer=0), "call: x").data.nbytes == 0


def test_memory_of_a_gpu_where_none_is_in_use(gpus: Any, backend: HostBackend) -> None:
    with pytest.raises(ArgumentError, match="^call: x: the tensor is on .*, and the host backend is in use"):
        view(gpus[1].Tensor((3,)), "call: x")


def test_our_streams_take_pytorchs(gpus: Any) -> None:
    backend, torch = gpus
    theirs = side_stream(backend, torch, 1, current=False)
    before = ncclcomm.current_stream(1)
    with ncclcomm.stream(theirs) as given:
        assert given is theirs
        assert ncclcomm.current_device() == 1
        assert ncclcomm.current_stream().handle == theirs.cuda_stream
    assert ncclcomm.current_stream(1) == before
    done: list[str] = []
    backend.of_others[theirs.cuda_stream].launch(done.append, "theirs")
    ours = ncclcomm.Stream(device=2)
    ours.wait_stream(theirs)
    ours.launch(done.append, "ours")
    ours.synchronize()
    assert done == ["theirs", "ours"]
    event = ncclcomm.Event()
    event.record(theirs)
    event.wait(theirs)
    event.synchronize()
    assert event.device == 1


def test_our_streams_take_pytorchs_events(gpus: Any) -> None:
    backend, torch = gpus
    stream, event = ncclcomm.Stream(device=1), torch.cuda.Event()
    stream.wait_event(event)
    assert stream.record_event(event) is event
    ncclcomm.default_stream(2).wait_event(event)
    assert event.asked == [("wait", stream.handle, 1), ("record", stream.handle, 1), ("wait", 0, 2)]
    timed = ncclcomm.Event(enable_timing=True)
    timed.record(stream)
    with pytest.raises(ArgumentError, match="TorchEvent"):
        timed.elapsed_time(event)


def test_pytorchs_streams_and_events_where_no_gpu_is_in_use(gpus: Any, backend: HostBackend) -> None:
    torch = gpus[1]
    for call in (
        lambda: ncclcomm.stream(torch.cuda.Stream(0, 0)),
        lambda: ncclcomm.Event().record(torch.cuda.Stream(0, 0)),
        lambda: ncclcomm.default_stream(0).record_event(torch.cuda.Event()),
    ):
        with pytest.raises(ArgumentError, match="is of a GPU, and the host backend is in use"):
            call()


def test_an_array_lent_to_cupy_comes_after_pytorchs_work(gpus: Any) -> None:
    backend, torch = gpus
    tensor = torch.Tensor((3,))
    assert ncclcomm.asarray(tensor).owner is tensor
    assert tensor.recorded == []  # one stream, nothing to be ordered
    theirs = side_stream(backend, torch, 1)
    ours = backend.create_stream(1, 0)
    backend.set_current_stream(ours)
    done: list[str] = []
    backend.of_others[theirs.cuda_stream].launch(done.append, "theirs")
    assert ncclcomm.asarray(tensor).owner is tensor
    ours.launch(done.append, "ours")
    ours.synchronize()
    assert done == ["theirs", "ours"]
    assert tensor.recorded == [ours.handle]

"""`ncclcomm.xp` on virtual devices, and the arrays it makes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ncclcomm
from contract.array_samples import host_backend  # noqa: F401
from ncclcomm import ArgumentError, UnsupportedError, asarray, device, device_index, to_numpy
from ncclcomm.devices.host_array import HostArray

pytestmark = pytest.mark.usefixtures("host_backend")


@pytest.fixture
def xp() -> Any:
    """The namespace of the backend in use."""
    return ncclcomm.xp


MAKERS: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda m: m.zeros((2, 3), dtype=m.float32),
    "ones": lambda m: m.ones(3),
    "full": lambda m: m.full((2, 2), 7),
    "empty": lambda m: m.empty(0),
    "arange": lambda m: m.arange(5),
    "linspace": lambda m: m.linspace(0, 1, 5),
    "eye": lambda m: m.eye(3),
    "array": lambda m: m.array([[1, 2], [3, 4]], dtype="f8"),
    "asarray": lambda m: m.asarray([1, 2]),
    "meshgrid": lambda m: m.meshgrid(m.arange(2), m.arange(3))[1],
    "random": lambda m: m.random.default_rng(3).normal(size=4),
    "concatenate": lambda m: m.concatenate([m.zeros(2), m.ones(2)]),
    "where": lambda m: m.where(m.arange(3) > 1, m.zeros(3), m.ones(3)),
    "linalg": lambda m: m.linalg.norm(m.arange(3.0)),
    "einsum": lambda m: m.einsum("i,i->", m.arange(3.0), m.arange(3.0)),
    "sum": lambda m: m.sum(m.arange(5)),
    "argmax": lambda m: m.argmax(m.arange(5)),
    "ufunc": lambda m: m.exp(m.arange(3.0)),
    "like": lambda m: m.zeros_like(m.arange(3)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_makes_arrays_on_the_current_device(xp: Any, name: str) -> None:
    for current in range(4):
        with device(current):
            found = MAKERS[name](xp)
        assert isinstance(found, HostArray)
        assert device_index(found) == current
        np.testing.assert_array_equal(to_numpy(found), MAKERS[name](np))


@pytest.mark.parametrize(
    "name", [name for name in MAKERS if name in ("sum", "argmax", "ufunc", "where", "linalg", "like")]
)
def test_results_stay_on_the_arrays_device(xp: Any, name: str) -> None:
    array = asarray(np.arange(4.0), device=3)
    for found in (xp.sum(array), xp.argmax(array), xp.exp(array), xp.where(array > 1, array, 0), xp.zeros_like(array)):
        assert device_index(found) == 3


def test_names_that_are_no_functions(xp: Any) -> None:
    assert xp.float32 is np.float32
    assert xp.pi == np.pi
    assert xp.newaxis is None
    assert xp.ndarray is HostArray
    assert "zeros" in dir(xp)
    with pytest.raises(AttributeError, match="no_such_name"):
        xp.no_such_name  # noqa: B018


def test_ufuncs_keep_their_methods(xp: Any) -> None:
    array = asarray(np.arange(1.0, 5.0), device=2)
    for found, expected in (
        (xp.add.reduce(array), 10.0),
        (xp.multiply.accumulate(array), [1, 2, 6, 24]),
        (xp.maximum.outer(array, array), np.maximum.outer(np.arange(1.0, 5), np.arange(1.0, 5))),
    ):
        assert device_index(found) == 2
        np.testing.assert_array_equal(to_numpy(found), expected)


@pytest.mark.parametrize("name", ["array", "asarray", "ascontiguousarray", "asfortranarray"])
def test_host_data_are_brought_and_copied(xp: Any, name: str) -> None:
    value = np.arange(6.0).reshape(2, 3)
    with device(1):
        found = getattr(xp, name)(value)
    value[:] = -1
    assert device_index(found) == 1
    np.testing.assert_array_equal(to_numpy(found), np.arange(6.0).reshape(2, 3))
    assert device_index(getattr(xp, name)(found)) == 1


def test_asnumpy(xp: Any) -> None:
    array = xp.arange(3)
    for found in (xp.asnumpy(array), array.get()):
        assert type(found) is np.ndarray
        assert not np.shares_memory(found, array.view(np.ndarray))
        np.testing.assert_array_equal(found, [0, 1, 2])


MIXES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "radd": lambda a, b: b + a,
    "iadd": lambda a, b: a.__iadd__(b),
    "matmul": lambda a, b: a @ b,
    "equal": lambda a, b: a == b,
    "out": lambda a, b: np.add(a, a, out=b),
    "where": lambda a, b: np.where(a > 1, a, b),
    "concatenate": lambda a, b: np.concatenate([a, b]),
    "stack": lambda a, b: ncclcomm.xp.stack([a, b]),
    "dot": lambda a, b: a.dot(b),
    "copyto": lambda a, b: np.copyto(a, b),
    "maximum": lambda a, b: ncclcomm.xp.maximum(a, b),
}


@pytest.mark.parametrize("mix", MIXES)
def test_two_devices_dont_mix(mix: str) -> None:
    first, second = asarray(np.arange(3.0), device=0), asarray(np.arange(3.0) + 1, device=2)
    with pytest.raises(
        ArgumentError, match=r"arrays of devices \[0, 2\] can't be mixed; move one with ncclcomm.asarray"
    ):
        MIXES[mix](first, second)
    np.testing.assert_array_equal(to_numpy(first), np.arange(3.0))
    np.testing.assert_array_equal(to_numpy(second), np.arange(3.0) + 1)


@pytest.mark.parametrize("mix", MIXES)
def test_host_memory_and_a_device_dont_mix(mix: str) -> None:
    with pytest.raises(UnsupportedError, match="host memory"):
        MIXES[mix](asarray(np.arange(3.0), device=0), np.arange(3.0))


def test_assignment_between_devices_doesnt_mix() -> None:
    first, second = asarray(np.arange(3.0), device=0), asarray(np.arange(3.0) + 1, device=2)
    with pytest.raises(ArgumentError, match=r"devices \[0, 2\]"):
        first[:] = second
    np.testing.assert_array_equal(to_numpy(first), np.arange(3.0))


def test_functions_of_host_arrays_in_lists_are_refused(xp: Any) -> None:
    with pytest.raises(UnsupportedError, match="host memory"):
        xp.concatenate([np.zeros(2), np.ones(2)])
    with pytest.raises(UnsupportedError, match="xp.sum: a NumPy array is in host memory; bring it"):
        xp.sum(np.zeros(2))


REDUCTIONS = ["sum", "mean", "max", "min", "prod", "std", "var", "any", "all", "argmax", "argmin", "trace"]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_totals_are_arrays_without_dimension(name: str) -> None:
    value = np.arange(1.0, 7.0).reshape(2, 3)
    array = asarray(value, device=3)
    for found in (getattr(array, name)(), getattr(np, name)(array)):
        assert isinstance(found, HostArray)
        assert (found.shape, device_index(found)) == ((), 3)
        np.testing.assert_array_equal(to_numpy(found), getattr(value, name)())


def test_views_and_elements_stay() -> None:
    value = np.arange(12.0).reshape(3, 4)
    array = asarray(value, device=2)
    looks: list[Callable[[Any], Any]] = [
        lambda a: a[1],
        lambda a: a[1, 2],
        lambda a: a[::2, ::-1],
        lambda a: a.T,
        lambda a: a.reshape(-1),
        lambda a: a[a > 3],
        lambda a: a.copy(),
        lambda a: a.astype("f4"),
        lambda a: -a,
        lambda a: 2 * a + 1,
        lambda a: a.sum(axis=0),
        lambda a: a.cumsum(),
    ]
    for look in looks:
        found = look(array)
        assert isinstance(found, HostArray)
        assert device_index(found) == found.device.id == int(found.device) == 2
        np.testing.assert_array_equal(to_numpy(found), look(value))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12.0).reshape(2, 2, 3),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
        np.array(["ab", "array"]),
        np.arange(40),
        np.array(3),
        np.zeros((0, 3), "f4"),
    ],
    ids=str,
)
def test_shown_as_by_numpy(value: np.ndarray[Any, Any]) -> None:
    array = asarray(value, device=1)
    assert str(array) == f"{array}" == str(value)
    first, *more = repr(value).replace("array", "HostArray", 1).split("\n")
    assert repr(array).split("\n") == [first, *(line and f"    {line}" for line in more)]


def test_in_place_and_scalars() -> None:
    array = asarray(np.arange(3.0), device=1)
    same = array
    array += 1
    array[0] = 10
    np.add.at(array, [1], 5.0)
    assert array is same
    np.testing.assert_array_equal(to_numpy(array), [10, 7, 3])
    assert float(array[0]) == 10.0
    assert array.sum().item() == 20.0
    assert array.tolist() == [10.0, 7.0, 3.0]


def test_pickled_and_copied_with_the_device() -> None:
    array = asarray(np.arange(3.0), device=3)
    for found in (pickle.loads(pickle.dumps(array)), copy.copy(array), copy.deepcopy(array)):
        assert isinstance(found, HostArray)
        assert device_index(found) == 3
        assert not np.shares_memory(found.view(np.ndarray), array.view(np.ndarray))
        np.testing.assert_array_equal(to_numpy(found), np.arange(3.0))

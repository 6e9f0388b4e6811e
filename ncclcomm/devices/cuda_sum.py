"""Kernels that add several arrays, of their own GPU or of others, in one pass; imported only where there is a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from ncclcomm.devices.cuda_streams import on_device

__all__ = ["MOST_TERMS", "sum_kernel", "sum_type"]

MOST_TERMS = 8

_THREADS = 512
_MOST_BLOCKS = 1024
_PACK_BYTES = 16

_ADD = "return a + b;"
_OR = "return a | b;"
# Through float, as NumPy and CuPy add: rounded once more, which changes nothing at these widths.
_ADD_HALF = """unsigned short sum;
    asm("{.reg .f32 x, y; cvt.f32.f16 x, %1; cvt.f32.f16 y, %2; add.rn.f32 x, x, y; cvt.rn.f16.f32 %0, x;}"
        : "=h"(sum) : "h"(a), "h"(b));
    return sum;"""

_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}

_TYPES: dict[np.dtype[Any], tuple[str, str, int]] = {
    np.dtype(f"{sign}{size}"): (kind, _ADD, 1) for sign in "iu" for size, kind in _UNSIGNED.items()
}
_TYPES |= {
    np.dtype("?"): ("unsigned char", _OR, 1),
    np.dtype("f2"): ("unsigned short", _ADD_HALF, 1),
    np.dtype("f4"): ("float", _ADD, 1),
    np.dtype("f8"): ("double", _ADD, 1),
    np.dtype("c8"): ("float", _ADD, 2),
    np.dtype("c16"): ("double", _ADD, 2),
}
"""By dtype the type to compute in, how two of it are added, and how many make an element."""

_SOURCE = """
typedef %(type)s T;
struct __align__(16) Pack { T part[16 / sizeof(T)]; };
__device__ __forceinline__ T add(T a, T b) {
    %(add)s
}
extern "C" __global__ void __launch_bounds__(%(threads)d) sum(T* out, %(parameters)s, long long count) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long step = gridDim.x * (long long)blockDim.x;
    const T* terms[%(terms)d] = {%(names)s};
    long long done = 0;
    if (((size_t)out %(addresses)s) %% sizeof(Pack) == 0) {
        const int lanes = sizeof(Pack) / sizeof(T);
        const long long packs = count / lanes;
        for (long long at = first; at < packs; at += %(unroll)d * step) {
            Pack loaded[%(unroll)d][%(terms)d];
            #pragma unroll
            for (int u = 0; u < %(unroll)d; ++u)
                if (at + u * step < packs)
                    #pragma unroll
                    for (int t = 0; t < %(terms)d; ++t) loaded[u][t] = ((const Pack*)terms[t])[at + u * step];
            #pragma unroll
            for (int u = 0; u < %(unroll)d; ++u)
                if (at + u * step < packs) {
                    Pack total = loaded[u][0];
                    #pragma unroll
                    for (int t = 1; t < %(terms)d; ++t)
                        #pragma unroll
                        for (int lane = 0; lane < lanes; ++lane)
                            total.part[lane] = add(total.part[lane], loaded[u][t].part[lane]);
                    ((Pack*)out)[at + u * step] = total;
                }
        }
        done = packs * lanes;
    }
    for (long long at = done + first; at < count; at += step) {
        T total = terms[0][at];
        #pragma unroll
        for (int t = 1; t < %(terms)d; ++t) total = add(total, terms[t][at]);
        out[at] = total;
    }
}
"""


def sum_type(dtype: np.dtype[Any]) -> tuple[str, str, int] | None:
    """How arrays of a dtype are added; None where only CuPy knows."""
    return _TYPES.get(dtype)


@functools.cache
def sum_kernel(dtype: np.dtype[Any], terms: int, device: int) -> Callable[[int, Sequence[int], int], None]:
    """What launches the kernel that adds so many arrays of a dtype, loaded on a device.

    Loading waits for the device, so it must not come between a call's waits.

    Returns:
        A function of the addresses of the result and of the terms, and the number of elements, which launches it on the
        device's current stream; the device is the current one.
    """
    kind, add, words = _TYPES[dtype]
    unroll = 4 if terms <= 2 else 2 if terms <= 4 else 1
    names = [f"a{t}" for t in range(terms)]
    source = _SOURCE % {
        "type": kind,
        "add": add,
        "threads": _THREADS,
        "terms": terms,
        "unroll": unroll,
        "parameters": ", ".join(f"const T* {name}" for name in names),
        "names": ", ".join(names),
        "addresses": " ".join(f"| (size_t){name}" for name in names),
    }
    kernel = cupy.RawKernel(source, "sum")
    with on_device(device):
        function = kernel.kernel
    a_block = _THREADS * unroll * _PACK_BYTES // dtype.itemsize
    block = (_THREADS,)

    def launch(out: int, addresses: Sequence[int], count: int) -> None:
        blocks = min(-(-count // a_block), _MOST_BLOCKS)
        function((blocks,), block, (out, *addresses, count * words))

    return launch

"""The CUDA driver, as much of it as a resident kernel needs: one context, memory, modules, two streams.

Everything is created before the kernel goes resident; afterwards only `ended` and `Stream.copy_*` are called, which
create nothing. Errors of the driver become `KernelError`s that name the call.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import KernelError, TargetError
from wpk.ir.types import DType

Bytes = NDArray[np.uint8]
_MAP_TYPES = {DType.BF16: "BFLOAT16", DType.F32: "FLOAT32"}  # as the driver calls the elements of a tensor map


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise TargetError(
            "this installation cannot run a GPU target", wanted="cuda-bindings", found="not installed",
            hint="pip install 'wpk[cu13]', or load with target='cpu'.",
        ) from None  # fmt: skip


def call(name: str, *arguments: Any) -> Any:
    """A driver function by name; its results, or a `KernelError`."""
    driver = _driver()
    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"{name} failed", wanted="CUDA_SUCCESS", found=status.name)
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True)
class Device:
    """A GPU: its ordinal, name, multiprocessors and compute capability."""

    ordinal: int
    name: str
    multiprocessors: int
    capability: tuple[int, int]


def find_device(ordinal: int = 0) -> Device:
    """The GPU of that ordinal; `TargetError` where there is none."""
    driver = _driver()
    # Whatever is loaded, is loaded before the launch: a lazy load would wait for the resident kernel for ever.
    os.putenv("CUDA_MODULE_LOADING", "EAGER")
    count, found = 0, "no driver"
    try:
        status, *_ = driver.cuInit(0)
        found = status.name
        if status == driver.CUresult.CUDA_SUCCESS:
            count = call("cuDeviceGetCount")
            found = f"{count} GPUs"
    except RuntimeError:  # the driver's library is not on this machine
        pass
    if ordinal >= count:
        raise TargetError(
            "no GPU that this process may use", wanted=f"GPU {ordinal}", found=found,
            hint="Load the profile with target='cpu'.",
        )  # fmt: skip
    handle = call("cuDeviceGet", ordinal)
    attribute = driver.CUdevice_attribute
    counts = [
        call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)
        for name in ("MULTIPROCESSOR_COUNT", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
    ]
    name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
    return Device(ordinal, name, counts[0], (counts[1], counts[2]))


class Gpu:
    """A device's context with what one kernel owns in it; `close` gives everything back."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._handle = call("cuDeviceGet", device.ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        self._memory: list[int] = []
        self._pinned: list[int] = []
        self._modules: list[Any] = []
        self._closed = False
        self.attach()
        flag = _driver().CUstream_flags.CU_STREAM_NON_BLOCKING
        self.kernel_stream, self.copy_stream = (call("cuStreamCreate", flag) for _ in range(2))

    def attach(self) -> None:
        """Make the context current in this thread."""
        call("cuCtxSetCurrent", self._context)

    # --- memory -------------------------------------------------------------------------------------------------
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free now, and in all."""
        self.attach()
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """Zeroed device memory; its address."""
        try:
            address = int(call("cuMemAlloc", max(size, 256)))
        except KernelError as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            free, total = self.memory()
            raise KernelError(
                f"{self.device.name} has too little memory", wanted=f"{size / 1e9:.3f} GB more",
                found=f"{free / 1e9:.3f} of {total / 1e9:.1f} GB free", hint="Lower --cap, or end what else uses it.",
            ) from None  # fmt: skip
        self._memory.append(address)
        call("cuMemsetD8Async", address, 0, max(size, 256), self.copy_stream)
        call("cuStreamSynchronize", self.copy_stream)
        return address

    def place(self, data: Bytes | bytes, size: int | None = None) -> int:
        """Device memory of `size` bytes (those of the data) that starts with this data; its address."""
        array = np.ascontiguousarray(np.frombuffer(data, np.uint8))
        address = self.allocate(array.size if size is None else size)
        if array.size:
            self.write(address, array)
        return address

    def free(self, address: int) -> None:
        """Give back what `allocate` or `place` gave."""
        self._memory.remove(address)
        call("cuMemFree", address)

    def write(self, address: int, data: Bytes) -> None:
        call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, self.copy_stream)
        call("cuStreamSynchronize", self.copy_stream)

    def read(self, address: int, size: int) -> Bytes:
        """Bytes of device memory, as they are now; works beside a resident kernel."""
        self.attach()
        found = np.empty(size, np.uint8)
        if size:
            call("cuMemcpyDtoHAsync", found.ctypes.data, address, size, self.copy_stream)
            call("cuStreamSynchronize", self.copy_stream)
        return found

    def map(self, address: int, size: int) -> int:
        """Pin host memory and map it: where the GPU sees it."""
        driver = _driver()
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        call("cuMemHostRegister", address, max(size, 1), flags)
        self._pinned.append(address)
        return int(call("cuMemHostGetDevicePointer", address, 0))

    def unmap(self, address: int) -> None:
        """End what `map` began."""
        self._pinned.remove(address)
        call("cuMemHostUnregister", address)

    # --- work that is done before a kernel goes resident: in order, on the copy stream ------------------------------
    def module(self, image: bytes) -> Any:
        """A cubin's code on the device."""
        self._modules.append(call("cuModuleLoadData", image))
        return self._modules[-1]

    def function(self, module: Any, entry: str) -> Any:
        """A kernel of a module, on the device before it is launched."""
        function = call("cuModuleGetFunction", module, entry.encode())
        call("cuFuncLoad", function)
        return function

    def drop(self, module: Any) -> None:
        """End what `module` began."""
        self._modules.remove(module)
        call("cuModuleUnload", module)

    def send(self, address: int, data: Bytes) -> None:
        """Begin to copy pinned host memory to the device; it must stay as it is until then."""
        call("cuMemcpyHtoDAsync", address, data.ctypes.data, data.nbytes, self.copy_stream)

    def start(self, function: Any, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        """Begin a kernel of 64-bit arguments that ends by itself."""
        parameters = (arguments, (ctypes.c_int64,) * len(arguments))
        call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, self.copy_stream, parameters, 0)

    def mark(self) -> Any:
        """An event: what was begun up to here."""
        event = call("cuEventCreate", _driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        call("cuEventRecord", event, self.copy_stream)
        return event

    def await_mark(self, event: Any) -> None:
        """Wait for an event's work, and drop the event."""
        call("cuEventSynchronize", event)
        call("cuEventDestroy", event)

    def settle(self) -> None:
        """Wait for all that was begun."""
        call("cuStreamSynchronize", self.copy_stream)

    def encode_map(
        self, address: int, dtype: DType, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzled: bool,
    ) -> Bytes:  # fmt: skip
        """A tensor map (128 bytes), bf16 or f32: innermost dimension first, strides in bytes of all but that one.

        swizzled: boxes are put into shared memory in 128-byte swizzle. What lies outside the tensor is zero.
        """
        driver = _driver()
        none = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[dtype]}")
        made = call(
            "cuTensorMapEncodeTiled", kind, len(sizes), address,
            [driver.cuuint64_t(n) for n in sizes], [driver.cuuint64_t(n) for n in strides],
            [driver.cuuint32_t(n) for n in box], [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{'128B' if swizzled else 'NONE'}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B, none,
        )  # fmt: skip
        return np.frombuffer(ctypes.string_at(int(made.getPtr()), 128), np.uint8)

    # --- the kernel ---------------------------------------------------------------------------------------------
    def load(self, image: bytes, entry: str, threads: int, shared_bytes: int) -> Any:
        """The kernel of a cubin, ready for a launch with that much dynamic shared memory."""
        driver = _driver()
        function = self.function(self.module(image), entry)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, limit, shared_bytes)
        fitting = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_bytes)
        if fitting != 1:
            raise KernelError(
                "the kernel's blocks cannot all be resident", wanted="one block a multiprocessor",
                found=f"{fitting} of {threads} threads with {shared_bytes} bytes of shared memory",
            )  # fmt: skip
        return function

    def launch(self, function: Any, blocks: int, threads: int, shared_bytes: int, argument: int) -> None:
        """Start the kernel; refused by the driver where not all blocks fit at once (a cooperative launch)."""
        parameters = ((argument,), (ctypes.c_int64,))
        call(
            "cuLaunchCooperativeKernel",
            function,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            shared_bytes,
            self.kernel_stream,
            parameters,
        )

    def ended(self) -> bool:
        """Has the kernel ended? `KernelError` where it broke off."""
        driver = _driver()
        self.attach()
        (status,) = driver.cuStreamQuery(self.kernel_stream)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(
                "the kernel broke off", wanted="a running kernel", found=status.name, hint="Load the profile again."
            )
        return True

    def wait_end(self, seconds: float) -> bool:
        """Wait for the kernel's end; False where it did not come."""
        limit = time.monotonic() + seconds
        while True:
            try:
                if self.ended():
                    return True
            except KernelError:
                return True
            if time.monotonic() > limit:
                return False
            time.sleep(0.0005)

    def close(self) -> None:
        """Give everything back; idempotent. The kernel must have ended (else memory is left to the process's end)."""
        if self._closed:
            return
        self._closed = True
        self.attach()
        driver = _driver()
        for stream in (self.kernel_stream, self.copy_stream):
            driver.cuStreamDestroy(stream)
        for address in self._memory:
            driver.cuMemFree(address)
        for address in self._pinned:
            driver.cuMemHostUnregister(address)
        for module in self._modules:
            driver.cuModuleUnload(module)
        driver.cuDevicePrimaryCtxRelease(self._handle)
        self._memory, self._pinned, self._modules = [], [], []

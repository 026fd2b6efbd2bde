"""A stand-in GPU: PyTorch's device "cuda" on a machine without one, in a build of PyTorch for the
CPU alone.

Every tensor on it is a tensor on "cuda": an operation that mixes it with a tensor of the CPU
raises, ``numpy()`` raises, `is_cuda` is true, backward runs in the device's own thread, autocast
and GradScaler are those of CUDA. What computes is the CPU, so results have the CPU's bits (but for
convolutions and fused attention, of which PyTorch takes other kernels here). What only a real
device does is imitated as unkindly as its documentation allows:

* memory holds NaN until it is written; a non-blocking copy into pinned memory is NaN until the host
  has waited for it;
* pinned memory may not change before a non-blocking copy from it has ended: the next wait raises;
* a stream that reads what another may still write, or writes what another may still use, raises; so
  does the next wait after memory was freed that another stream may still use;
* it cannot be used in a fork of a process that used it; its memory has a limit and is counted; an
  error sticks;
* everything that makes the host wait is counted, and can be traced (`waits`).

It says nothing about speed, CUDA's kernels and their rounding, NCCL, graphs, or torch.compile for
CUDA.

``make standin`` compiles it and prints the folder for PYTHONPATH; PyTorch itself loads it then (the
entry point "torch.backends"), in every process that a node starts. STANDIN_DEVICES (1),
STANDIN_MEMORY (bytes of each), STANDIN_CAPABILITY (8.0) and STANDIN_NAME say what device it plays,
STANDIN_NO_FLOAT64=1 that it has no float64, as Apple's; STANDIN_BREAKS=N has the Nth wait find an
error that sticks, STANDIN_WAITS=FILE gets what made the host wait, by thread and line, from each
process at its end.
"""

import os
import types
from collections import Counter
from contextlib import contextmanager


def load():
    """Make "cuda" the stand-in, unless this build of PyTorch can have the real one."""
    import torch

    if hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    import _standin as lib

    _devices(torch, lib)
    _memory(torch, lib)
    _streams(torch)
    _collectives(lib)
    if os.environ.get("STANDIN_WAITS"):
        _trace_to(os.environ["STANDIN_WAITS"])


def _devices(torch, lib):
    cuda, core = torch.cuda, torch._C
    major, minor = map(int, os.environ.get("STANDIN_CAPABILITY", "8.0").split("."))
    name = os.environ.get("STANDIN_NAME", "Stand-in")

    def count():
        lib.touch_forks()
        return lib.devices()

    def properties(index):
        memory = torch.accelerator.get_memory_info(index)[1]
        return types.SimpleNamespace(
            name=name,
            major=major,
            minor=minor,
            total_memory=memory,
            multi_processor_count=1,
            gcnArchName="",
            uuid=f"standin-{index}",
        )

    def init():
        lib.touch()
        cuda.default_generators = tuple(lib.generator(i) for i in range(lib.devices()))
        cuda._get_device_properties = properties

    def exchange(index):
        before = lib.current()
        lib.set_current(index)
        return before

    def maybe_exchange(index):  # torch.compile wants two functions
        return exchange(index)

    core._cuda_getDeviceCount, core._cuda_init, core._cuda_isInBadFork = count, init, lib.bad_fork
    core._cuda_getDevice, core._cuda_setDevice, core._cuda_synchronize = (
        lib.current,
        lib.set_current,
        lib.synchronize,
    )
    core._cuda_exchangeDevice, core._cuda_maybeExchangeDevice = exchange, maybe_exchange
    core._cuda_getArchFlags = lambda: None
    cuda._is_in_bad_fork, cuda._cudart = lib.bad_fork, object()
    cuda._exchange_device, cuda._maybe_exchange_device = exchange, maybe_exchange
    cuda._device_count_nvml = lib.devices
    cuda._queued_calls.clear()  # checks of the build against the card


def _memory(torch, lib):
    cuda, memory = torch.cuda, torch.accelerator.memory

    def index(device):
        return cuda._utils._get_device_index(device, optional=True)

    for module in (cuda, cuda.memory):
        module.mem_get_info = lambda device=None: memory.get_memory_info(index(device))
        module.memory_allocated = module.memory_reserved = lambda device=None: (
            memory.memory_allocated(index(device))
        )
        module.max_memory_allocated = module.max_memory_reserved = lambda device=None: (
            memory.max_memory_allocated(index(device))
        )
        module.memory_stats = lambda device=None: memory.memory_stats(index(device))
        module.reset_peak_memory_stats = lambda device=None: memory.reset_peak_memory_stats(
            index(device)
        )
        module.empty_cache = memory.empty_cache

    made, resized = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new_storage(cls, *arguments, device=None, **options):
        if device is not None and torch.device(device).type == "cuda":
            return torch.empty(
                *arguments or (0,), dtype=torch.uint8, device=device
            ).untyped_storage()
        return (
            made(cls, *arguments, **options)
            if device is None
            else made(cls, *arguments, device=device, **options)
        )

    def resize(storage, size):
        if storage.device.type != "cuda":
            return resized(storage, size)
        lib.resize_storage(storage, size)
        return storage

    torch.UntypedStorage.__new__, torch.UntypedStorage.resize_ = staticmethod(new_storage), resize


def _streams(torch):
    cuda, accelerator = torch.cuda, torch.accelerator

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **ids):
            if ids:
                return super().__new__(cls, **ids)
            index = cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self):
            return self.stream_id

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            return super().__new__(
                cls,
                "cuda",
                enable_timing=enable_timing,
                blocking=blocking,
                interprocess=interprocess,
            )

        def record(self, stream=None):
            super().record(stream or current())

        def wait(self, stream=None):
            super().wait(stream or current())

    def wrapped(stream):
        return Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def current(device=None):
        return wrapped(
            accelerator.current_stream(cuda._utils._get_device_index(device, optional=True))
        )

    def default(device=None):
        found = current(device)
        return Stream(stream_id=0, device_index=found.device_index, device_type=found.device_type)

    @contextmanager
    def using(stream):
        if stream is None:
            yield
            return
        before, device = current(stream.device), accelerator.current_device_index()
        accelerator.set_stream(stream)
        try:
            yield
        finally:
            accelerator.set_stream(before)
            accelerator.set_device_index(device)

    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    cuda.current_stream, cuda.default_stream, cuda.stream, cuda.set_stream = (
        current,
        default,
        using,
        accelerator.set_stream,
    )
    torch._C._cuda_getCurrentRawStream = lambda index: current(index).stream_id


def _collectives(lib):
    """Have the backend "nccl" be gloo, on the memory of the stand-in's tensors."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    class ProcessGroupNCCL(lib.Relay):
        class Options:
            is_high_priority_stream = False

        def __init__(self, store, rank, size, options):
            super().__init__(
                rank, size, dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            )

        def _set_sequence_number_for_group(self): ...

    c10d._NCCL_AVAILABLE, c10d.ProcessGroupNCCL, dist.ProcessGroupNCCL = (
        True,
        ProcessGroupNCCL,
        ProcessGroupNCCL,
    )


def _trace_to(file):
    import atexit

    import torch

    tracing = waits()
    found = tracing.__enter__()

    def write():
        tracing.__exit__(None, None, None)
        with open(file, "a") as out:
            for device in range(torch.accelerator.device_count()):
                out.write(
                    f"{os.getpid()} {torch.accelerator.max_memory_allocated(device)} bytes, the "
                    f"peak of device {device}\n"
                )
            out.writelines(
                f"{os.getpid()} {number} {what}\n" for what, number in found.most_common()
            )

    atexit.register(write)


def pinned_bytes():
    """Return the bytes of pinned memory that are taken from the system, with what PyTorch keeps for
    later.
    """
    import _standin as lib

    return lib.pinned_bytes()


@contextmanager
def waits(depth=4, only="shoal"):
    """Count what makes the host wait for the device within the block.

    By thread, reason, and the ``depth`` innermost frames in files with ``only`` in their path.
    """
    import sys
    import threading

    import _standin as lib

    found = Counter()

    def noted(why):
        frame, frames = sys._getframe(1), []
        while frame is not None and len(frames) < depth:
            if only in frame.f_code.co_filename:
                frames.append(
                    f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"
                )
            frame = frame.f_back
        found[f"{threading.current_thread().name} | {why} | {' < '.join(frames)}"] += 1

    lib.on_wait(noted)
    try:
        yield found
    finally:
        lib.on_wait(None)

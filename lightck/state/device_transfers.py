"""Copies of tensors from a device to host memory while the device computes.

A ``DeviceTransfer`` copies from one device, on a stream of its own. Such a copy runs in parallel with the computation,
so an update of the tensor has to wait until the copy has arrived. The copy of a tensor that the next kernels change (a
buffer) is enqueued on the stream of the computation instead. No function in this file waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from lightck.errors import SessionError
from lightck.pool.format.layout import is_dense

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source): memory to copy to, and the tensor to copy. The target has as many bytes as the tensor. It is host
memory, except in ``copy_on_device``, where it is memory of the device."""


class StreamPoint(Protocol):
    """A point in a stream, which a thread can wait for."""

    def synchronize(self) -> None:
        """Wait, without the GIL, until the device has passed this point."""


class DeviceTransfer(Protocol):
    """Copies from one device."""

    def mark(self) -> StreamPoint:
        """Return a point in the stream of the computation. The device passes it when all work that was enqueued there
        before this call is done."""

    def send(self, pairs: Sequence[Pair], after: StreamPoint) -> StreamPoint:
        """Enqueue copies that run in parallel with the computation, after the device has passed ``after``. Return the
        point at which the copies have arrived. The tensors must not change before the device has passed this point."""

    def send_in_order(self, pairs: Sequence[Pair]) -> StreamPoint:
        """Enqueue copies in the order of the computation, and return the point at which the copies have arrived. Work
        that is enqueued after this call may change the tensors."""

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Copy bytes of a tensor to host memory now, and return the copy. This waits for the copies that ``send`` has
        enqueued (and for what these wait for), but for no other pending work of the computation. ``start``: the first
        byte; ``nbytes``: how many bytes (None: all from ``start`` on)."""

    def copy_on_device(self, pairs: Sequence[Pair]) -> None:
        """Do what ``send_in_order`` does, but copy into memory of the same device, and return nothing."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory that the device can write to directly."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate memory on the device."""

    def free_nbytes(self) -> int:
        """Return how many bytes of device memory are still free when the training uses as much memory as it did at its
        peak so far."""

    def register(self, memory: torch.Tensor) -> None:
        """Let the device write to this host memory directly. Raises ``RuntimeError`` if it cannot."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`. No copy to this memory may be pending."""

    def bind_thread(self) -> None:
        """Select this device for the calling thread. To be called on a thread before it sends."""

    def add_update_stream(self) -> None:
        """Remember the current stream as one on which an update was enqueued."""

    def join_updates(self) -> None:
        """Make the current stream wait for all that is enqueued so far on the remembered streams: the updates, and the
        work after them (a GradScaler's scale)."""

    def is_capturing(self) -> bool:
        """Whether work on the current stream is captured in a graph instead of executed."""

    def release_host_memory(self) -> None:
        """Release host memory that `memory` allocated, and that nothing uses now, to the operating system."""


def is_dense_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory is one dense run of its bytes, in some order of dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or is_dense(tuple(tensor.shape), tuple(tensor.stride()))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on its device: a view of the tensor if it is dense, otherwise the bytes of a
    contiguous copy."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return _as_bytes(tensor.detach()) if is_dense_tensor(tensor) else bytes_in_order(tensor)


def bytes_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements on its device, in the order of their indices."""
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as bytes. ``view`` alone refuses a dimension of one element whose stride is not 1, although
    such a tensor counts as contiguous."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class CudaTransfer:
    """Copies from one CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._updated_on: dict[torch.cuda.Stream, None] = {}
        """A set with an order: its keys are the streams on which updates of this step were enqueued, and its last key
        is the stream of the last update. The keys are kept until the first update of the next step."""
        self._is_next_update_first = True
        """Whether the next update is the first one of its step."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """The stream of copies that run in parallel with the computation."""

    def mark(self) -> StreamPoint:
        return self._record_event(self._update_stream())

    def send(self, pairs: Sequence[Pair], after: Any) -> StreamPoint:
        self._stream.wait_event(after)
        return self._enqueue_copies(self._stream, pairs)

    def send_in_order(self, pairs: Sequence[Pair]) -> StreamPoint:
        arrival = self._enqueue_copies(self._update_stream(), pairs)
        self._delay_next_writes(arrival)
        return arrival

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            return bytes_of(tensor)[start : None if nbytes is None else start + nbytes].to("cpu")

    def copy_on_device(self, pairs: Sequence[Pair]) -> None:
        stream = self._update_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_([target for target, _ in pairs], [bytes_of(tensor) for _, tensor in pairs])
        self._delay_next_writes(self._record_event(stream))

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free_nbytes(self) -> int:
        # At a boundary the activations of the next step do not exist yet. So of the memory that torch has reserved,
        # only what exceeds the peak so far counts as unused, and not all that is unused at present.
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + unused

    def register(self, memory: torch.Tensor) -> None:
        _registered.add(memory, self._device)

    def unregister(self, memory: torch.Tensor) -> None:
        _registered.remove(memory, self._device)

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)  # otherwise CUDA makes a context on device 0 for a new thread

    def add_update_stream(self) -> None:
        if self._is_next_update_first:
            self._updated_on, self._is_next_update_first = {}, False
        stream = torch.cuda.current_stream(self._device)
        self._updated_on.pop(stream, None)
        self._updated_on[stream] = None

    def join_updates(self) -> None:
        self._is_next_update_first = True
        current = torch.cuda.current_stream(self._device)
        for stream in self._updated_on:
            if stream != current:
                current.wait_stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def release_host_memory(self) -> None:
        # torch caches free pinned memory, and has no public function that empties this cache.
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

    def _update_stream(self) -> torch.cuda.Stream:
        """Return the stream of the last update (the current stream if there was no update), and make it wait for the
        current stream. The two streams can differ at a boundary, for example if the next forward runs on a stream of
        its own."""
        current = torch.cuda.current_stream(self._device)
        last = next(reversed(self._updated_on), current)
        if last != current:
            last.wait_stream(current)
        return last

    def _delay_next_writes(self, arrival: torch.cuda.Event) -> None:
        """Make the streams that may compute the next forward wait for ``arrival``, because that forward may change the
        tensors."""
        for stream in {torch.cuda.current_stream(self._device), *self._updated_on}:
            stream.wait_event(arrival)

    def _enqueue_copies(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> torch.cuda.Event:
        """Enqueue the copies on ``stream``, and return an event after them. If a copy cannot be enqueued, wait for the
        copies that were enqueued before, because the caller gets no event to wait for."""
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                targets, sources = [target for target, _ in pairs], [bytes_of(tensor) for _, tensor in pairs]
                torch._foreach_copy_(targets, sources, non_blocking=True)  # one call, without the GIL
        except BaseException:
            self._record_event(stream).synchronize()
            raise
        return self._record_event(stream)

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # A blocking event lets the waiting thread sleep, which leaves its processor to the data loader.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _Registered:
    """Host memory that all CUDA devices may write to. Several users may register the same memory."""

    _PORTABLE = 1  # cudaHostRegisterPortable: for all devices

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        """Address of registered memory -> how many users have registered it."""

    def add(self, memory: torch.Tensor, device: torch.device) -> None:
        address = memory.data_ptr()
        if address not in self._users:
            self._call(device, "cudaHostRegister", address, memory.numel(), self._PORTABLE)
        self._users[address] = self._users.get(address, 0) + 1

    def remove(self, memory: torch.Tensor, device: torch.device) -> None:
        address = memory.data_ptr()
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            with suppress(RuntimeError):
                self._call(device, "cudaHostUnregister", address)

    def _call(self, device: torch.device, name: str, *args: int) -> None:
        """Call a function of the CUDA runtime. Raises ``RuntimeError`` if it fails."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # otherwise CUDA makes a context on device 0
            status = getattr(runtime, name)(*args)
            if int(status) != 0:
                with suppress(RuntimeError):
                    # The runtime keeps the error and reports it at the thread's next call, which would be the user's
                    # next kernel. torch.ones fetches and clears the error.
                    torch.ones(1, device=device)
                raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(status)}")


_registered = _Registered()
_transfers: dict[torch.device, DeviceTransfer] = {}


def transfer_of(tensor: torch.Tensor) -> DeviceTransfer | None:
    """Return the transfer of a tensor's device; None for a tensor in host memory, or on a device that lightck can read
    only with ``.to("cpu")``."""
    if not tensor.is_cuda:
        return None
    device = tensor.device
    if device not in _transfers:
        _transfers[device] = CudaTransfer(device)
    return _transfers[device]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """If the tensor's device has a transfer, return a copy of its bytes in host memory. Otherwise return the tensor
    itself. The copy runs in parallel with the computation, so nothing may change the tensor during the call."""
    transfer = transfer_of(tensor)
    return tensor if transfer is None else transfer.read(tensor)


class Devices:
    """The devices of one session's tensors, and the order of their work at a boundary.

    A device executes work later than it is enqueued, and on several streams. A checkpoint holds the result of the
    *updates*. So the streams of all updates are remembered, and at the boundary the current stream waits for these
    streams before anything is read. Work of other sessions on the same device is not considered.
    """

    def __init__(self) -> None:
        self._transfers: list[DeviceTransfer] = []

    def set_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set the session's tensors. To be called before the first update, so that the stream of that update is
        remembered."""
        transfers = (transfer_of(tensor) for tensor in tensors)
        self._transfers = list(dict.fromkeys(transfer for transfer in transfers if transfer is not None))

    def add_update_streams(self) -> None:
        """Remember the current streams. To be called after an optimizer's step, on its thread."""
        for transfer in self._transfers:
            transfer.add_update_stream()

    def join_updates(self) -> None:
        """Make the current stream of each device wait for the updates. To be called at a boundary before anything is
        read, because the current stream may be another one than the stream of the update."""
        for transfer in self._transfers:
            transfer.join_updates()

    def refuse_graph_capture(self, what: str) -> None:
        """Raise ``SessionError`` if the work of the current call is captured in a CUDA graph instead of executed.
        ``what``: the call, for the message."""
        if self._transfers and any(transfer.is_capturing() for transfer in self._transfers):
            raise SessionError(
                f"{what} is being captured in a CUDA graph. Replays of a graph run no Python, so lightck would "
                "notice none of them and save nothing. Capture forward and backward only, after session.flush(), and "
                "leave optimizer.step() outside (torch.cuda.make_graphed_callables does so)."
            )

    def is_in_graph_capture(self, is_idle: Callable[[], bool]) -> bool:
        """Whether the current forward is captured in a CUDA graph, and is therefore no boundary. ``is_idle``: returns
        True if no checkpoint is due or in flight. If the forward is captured while one is due or in flight, raises
        ``SessionError``, because lightck would have to wait for that checkpoint, and the wait would end the capture."""
        if not self._transfers or not any(transfer.is_capturing() for transfer in self._transfers):
            return False
        if not is_idle():
            raise SessionError(
                "A forward pass is being captured in a CUDA graph while a checkpoint is being saved. To save the "
                "checkpoint, lightck waits for the device, which would end the capture. Call session.flush() right "
                "before the capture."
            )
        return True

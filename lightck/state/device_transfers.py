"""How the bytes of tensors on a device get into host memory while the device goes on computing.

A ``DeviceTransfer`` is one device's way out. It has a stream of its own: what is sent there takes its time beside the
computation, and whoever updates such a tensor waits until it has arrived. What the very next kernels will change
(buffers) is sent in the order of the computation instead. Nothing here waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from lightck.errors import SessionError
from lightck.pool.format.layout import is_dense

Pair = tuple[torch.Tensor, torch.Tensor]
"""Host memory (bytes, as long as the tensor) and the tensor that goes there."""


class Arrival(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait, without the GIL, until the device has passed it."""


class DeviceTransfer(Protocol):
    """One device's way out."""

    def mark(self) -> Arrival:
        """All that the computation was told to do so far."""

    def send(self, pairs: Sequence[Pair], after: Arrival) -> Arrival:
        """Beside the computation, but not before ``after`` has passed. The tensors must not change until it arrives."""

    def send_in_order(self, pairs: Sequence[Pair]) -> Arrival:
        """In the order of the computation: what it is told to do from now on may change the tensors."""

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Bytes of a tensor as they are now, whatever the computation still has to do."""

    def copy_on_device(self, pairs: Sequence[Pair]) -> None:
        """As ``send_in_order``, into memory on the device itself."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can write to by itself."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Memory on the device."""

    def free_nbytes(self) -> int:
        """How much of it could be had now."""

    def register(self, memory: torch.Tensor) -> None:
        """From here on the device may write to this memory by itself. Raises ``RuntimeError`` where it cannot."""

    def unregister(self, memory: torch.Tensor) -> None:
        """It is not the device's any more. Nothing is on its way there."""

    def bind_thread(self) -> None:
        """Called on a thread before it sends."""

    def add_update_stream(self) -> None:
        """The stream that is current here has been told to update."""

    def join_updates(self) -> None:
        """What the stream that is current here is told from now on comes after all that streams with updates were told
        so far: after the updates, and after what followed them (a scaler's scale)."""

    def is_capturing(self) -> bool:
        """Whether what the stream that is current here is told is recorded for a graph, and not done."""

    def release_host_memory(self) -> None:
        """Host memory that was got here and is not held any more goes back to the system."""


def is_dense_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory is one dense run of its bytes, in some order of dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or is_dense(tuple(tensor.shape), tuple(tensor.stride()))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor on its device: as they lie where it lies dense, else those of a contiguous copy."""
    return _as_bytes(tensor.detach()) if is_dense_tensor(tensor) else bytes_in_order(tensor)


def bytes_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements on its device, in the order of their indices."""
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """``view`` alone refuses a dimension of one element whose stride is not 1, which counts as contiguous."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class CudaTransfer:
    """Of a CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._updated_on: dict[torch.cuda.Stream, None] = {}
        """Streams that made the updates of this version, the last one last."""
        self._is_joined = True
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Arrival:
        return self._record_event(self._update_stream())

    def send(self, pairs: Sequence[Pair], after: Any) -> Arrival:
        self._stream.wait_event(after)
        return self._enqueue_copies(self._stream, pairs)

    def send_in_order(self, pairs: Sequence[Pair]) -> Arrival:
        arrival = self._enqueue_copies(self._update_stream(), pairs)
        self._delay_next_writes(arrival)
        return arrival

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            return raw(tensor)[start : None if nbytes is None else start + nbytes].to("cpu")

    def copy_on_device(self, pairs: Sequence[Pair]) -> None:
        stream = self._update_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_([target for target, _ in pairs], [raw(tensor) for _, tensor in pairs])
        self._delay_next_writes(self._record_event(stream))

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free_nbytes(self) -> int:
        # Not by what is allocated now: at a boundary the activations of the next step are not there yet.
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + unused

    def register(self, memory: torch.Tensor) -> None:
        _registered.add(memory, self._device)

    def unregister(self, memory: torch.Tensor) -> None:
        _registered.remove(memory, self._device)

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)  # else a new thread makes itself a context on the first device

    def add_update_stream(self) -> None:
        if self._is_joined:
            self._updated_on, self._is_joined = {}, False
        stream = torch.cuda.current_stream(self._device)
        self._updated_on.pop(stream, None)
        self._updated_on[stream] = None

    def join_updates(self) -> None:
        self._is_joined = True
        current = torch.cuda.current_stream(self._device)
        for stream in self._updated_on:
            if stream != current:
                current.wait_stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def release_host_memory(self) -> None:
        # torch keeps pinned memory that is free for whoever wants some next. It has no public name for this.
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

    def _update_stream(self) -> torch.cuda.Stream:
        """The stream of the last update. Another one may be current at a boundary, that of the next forward perhaps,
        which has joined the updates: what it was told so far comes before."""
        current = torch.cuda.current_stream(self._device)
        last = next(reversed(self._updated_on), current)
        if last != current:
            last.wait_stream(current)
        return last

    def _delay_next_writes(self, arrival: torch.cuda.Event) -> None:
        """Whoever computes the next forward may change what is on its way."""
        for stream in {torch.cuda.current_stream(self._device), *self._updated_on}:
            stream.wait_event(arrival)

    def _enqueue_copies(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> torch.cuda.Event:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for target, tensor in pairs:
                    target.copy_(raw(tensor), non_blocking=True)
        except BaseException:
            self._record_event(stream).synchronize()  # nothing stays under way that nobody knows of
            raise
        return self._record_event(stream)

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Waits asleep: a processor is worth more to the loader.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _Registered:
    """Memory that all CUDA devices may write to; who registers it second finds it registered."""

    _PORTABLE = 1  # cudaHostRegisterPortable: for all devices

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

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
        """Raises ``RuntimeError``."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # else it makes itself a context on the first one
            status = getattr(runtime, name)(*args)
            if int(status) != 0:
                with suppress(RuntimeError):
                    # The runtime keeps the error of this thread for whoever looks next, which would be the user's next
                    # kernel. Here it is looked at, and is gone.
                    torch.ones(1, device=device)
                raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(status)}")


_registered = _Registered()
_transfers: dict[torch.device, DeviceTransfer] = {}


def transfer_of(tensor: torch.Tensor) -> DeviceTransfer | None:
    """The way out of a tensor's device; None where it has none but ``.to("cpu")``."""
    if not tensor.is_cuda:
        return None
    device = tensor.device
    if device not in _transfers:
        _transfers[device] = CudaTransfer(device)
    return _transfers[device]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that nobody is about to change, beside the computation."""
    transfer = transfer_of(tensor)
    return tensor if transfer is None else transfer.read(tensor)


class Devices:
    """The devices that a session's tensors are on, and in what order they do what a boundary needs. What another
    session does on a device is not its matter.

    A device does later what it is told now, on several streams. A version is what the *updates* made: so their streams
    are noted at each update, and joined by whatever stream is current at the boundary, before anything is read there.
    """

    def __init__(self) -> None:
        self._transfers: list[DeviceTransfer] = []

    def set_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are the session's tensors now. Before the first update, so that it is noted."""
        transfers = (transfer_of(tensor) for tensor in tensors)
        self._transfers = list(dict.fromkeys(transfer for transfer in transfers if transfer is not None))

    def add_update_streams(self) -> None:
        """After an optimizer's step, on the thread that made it."""
        for transfer in self._transfers:
            transfer.add_update_stream()

    def join_updates(self) -> None:
        """At a boundary, before anything is read: another stream may be current than that of the update."""
        for transfer in self._transfers:
            transfer.join_updates()

    def refuse_capture(self, what: str) -> None:
        """Raises ``SessionError`` where what is called now is recorded for a CUDA graph, and not done."""
        if any(transfer.is_capturing() for transfer in self._transfers):
            raise SessionError(
                f"{what} is being captured in a CUDA graph. Its replays run no Python, so lightck would see none of "
                "them and save nothing. Capture forward and backward only, after session.flush(), and leave "
                "optimizer.step() outside (torch.cuda.make_graphed_callables does so)."
            )

    def is_captured(self, is_idle: Callable[[], bool]) -> bool:
        """Whether this forward is recorded for a CUDA graph: no boundary, then. Raises ``SessionError`` where a version
        is due or under way: to wait for it would end the capture."""
        if not any(transfer.is_capturing() for transfer in self._transfers):
            return False
        if not is_idle():
            raise SessionError(
                "A forward pass is being captured in a CUDA graph while a version is being saved: what that waits for "
                "would end the capture. Call session.flush() right before the capture."
            )
        return True

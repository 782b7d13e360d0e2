"""What a checkpoint at every step costs, as ratios within one run.

    python bench/overhead.py [--small] [--pool-dir DIR] [--out FILE]

Trains a GPT of examples/train_gpt.py with a checkpoint at every update and reports
- *stall*: wall time on the training thread per step, over the step's time;
- *direct*: CPU seconds of all lightck threads and hooks per checkpoint, over one memcpy of the same tensors into a
  touched mapping of the same kind;
- *recovery*: bandwidth of a verified recovery into live tensors, over a memcpy of the same bytes.
Every run recovers what it saved and compares it. Fixed seed; median and range over the steps after a warm-up.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import lightck

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt

SMALL = {"layers": 2, "width": 128, "context": 64, "batch": 4, "steps": 12}
FULL = {"layers": 6, "width": 384, "context": 128, "batch": 4, "steps": 20}
WARM_UP = 4


def build(size, seed=0):
    torch.manual_seed(seed)
    model = train_gpt.GPT(size["layers"], size["width"], 4, size["context"], 0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, size):
    tokens = torch.randint(train_gpt.VOCABULARY, (size["batch"], size["context"] + 1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_tensors(model, optimizer):
    return [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]


def train(model, optimizer, size, session):
    """Per step after the warm-up: (seconds, stall seconds, cpu seconds of lightck)."""
    rows = []
    for i in range(WARM_UP + size["steps"]):
        before, began = session.stats(), time.perf_counter()
        step(model, optimizer, size)
        seconds, after = time.perf_counter() - began, session.stats()
        if i >= WARM_UP:
            stall = after.stall_seconds - before.stall_seconds
            rows.append((seconds, stall, after.cpu_seconds - before.cpu_seconds))
    return rows


def memcpy_cpu_seconds(tensors, folder, turns=5):
    """CPU seconds of one numpy copy of all tensors into a touched, shared mapping of a file in ``folder``."""
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(nbytes)
        target = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        target[:] = 1
        sources = [np.frombuffer(t.detach().reshape(-1).view(torch.uint8).numpy(), np.uint8) for t in tensors]
        times = [_copy_all(sources, target) for _ in range(turns)]
    return min(times), nbytes


def _copy_all(sources, target):
    began, at = time.thread_time(), 0
    for source in sources:
        target[at : at + len(source)] = source
        at += len(source)
    return time.thread_time() - began


def recovery(path, size, expected):
    """Seconds of a verified recovery into a live model, after checking that every bit is right."""
    model, optimizer = build(size, seed=1)
    step(model, optimizer, size)
    began = time.perf_counter()
    lightck.recover(path, model, optimizer)
    seconds = time.perf_counter() - began
    same = all(torch.equal(a, b) for a, b in zip(state_tensors(model, optimizer), expected, strict=True))
    if not same:
        raise SystemExit("what was recovered is not what was saved")
    return seconds


def measure(size, folder):
    model, optimizer = build(size)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = os.path.join(temporary, "bench.pool")
        session = lightck.attach(model, path)
        medium = str(session.durability)
        rows = train(model, optimizer, size, session)
        session.close()
        tensors = [t.detach().clone() for t in state_tensors(model, optimizer)]
        copy_seconds, nbytes = memcpy_cpu_seconds(tensors, temporary)
        recovery_seconds = statistics.median(recovery(path, size, tensors) for _ in range(3))
    seconds, stall, cpu = (sorted(column) for column in zip(*rows, strict=True))
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "kernels": kernels(),
        "pool": medium,
        "size": size,
        "state_bytes": nbytes,
        "step_seconds": statistics.median(seconds),
        "stall_seconds": [stall[0], statistics.median(stall), stall[-1]],
        "stall_share": statistics.median(stall) / statistics.median(seconds),
        "cpu_seconds": [cpu[0], statistics.median(cpu), cpu[-1]],
        "memcpy_cpu_seconds": copy_seconds,
        "direct": statistics.median(cpu) / copy_seconds,
        "recovery_seconds": recovery_seconds,
        "recovery_over_memcpy": copy_seconds / recovery_seconds,
    }


def kernels():
    from lightck._native import ffi, lib

    return ffi.string(lib.lck_isa_name()).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a size for CI")
    parser.add_argument("--pool-dir", default="/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    result = measure(SMALL if args.small else FULL, args.pool_dir)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['machine']}; {result['kernels']} kernels; pool on {result['pool']}")
    print(f"state {result['state_bytes'] / 1e6:.1f} MB, step {result['step_seconds'] * 1e3:.1f} ms")
    print(f"stall per step  {result['stall_seconds'][1] * 1e3:8.2f} ms  {result['stall_share']:.2%} of the step")
    print(f"direct          {result['direct']:8.2f} memcpy (CPU seconds per checkpoint over one memcpy)")
    print(f"recovery        {result['recovery_over_memcpy']:8.2f} of a memcpy's bandwidth, verified")


if __name__ == "__main__":
    main()

"""Train a small GPT-2 style model, byte by byte, on the sources of Python's standard library.

    python examples/train_gpt.py                # kill it whenever you like ...
    python examples/train_gpt.py                # ... and run it again: it continues from the step it had reached
    python examples/train_gpt.py --pool none    # the same training without lightck, which is then never imported

It needs torch, numpy and lightck.

Everything is plain PyTorch: AdamW with and without weight decay, warm-up and cosine schedule, gradient clipping,
accumulation over micro-batches, a shuffled DataLoader with workers, dropout, evaluation. Search for "lightck" to see
the few lines that make each finished update survive a crash.
"""

import argparse
import math
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


# ---- the text ------------------------------------------------------------------------------------------------------


def standard_library(limit):
    """The first ``limit`` bytes of the standard library's top-level sources, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return text[:limit]


def read_text(args):
    """Bytes to train on, and bytes held out: the last tenth."""
    text = bytearray(args.text.read_bytes()[: args.bytes]) if args.text else standard_library(args.bytes)
    data = torch.frombuffer(text, dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


class Windows(Dataset):
    """``count`` windows spread over the text. Where one begins is drawn anew each time, in the loader's worker."""

    def __init__(self, data, count, context):
        self.data, self.count, self.context = data, count, context
        self.stride = (len(data) - context - 1) // count
        if self.stride < 1:
            raise SystemExit(f"{len(data)} bytes of text do not hold {count} windows: pass a longer --text")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = index * self.stride + int(torch.randint(self.stride, ()))
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


# ---- the model -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, dropout):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x, y):
        """Mean cross entropy of predicting ``y`` from ``x``, both (batch, length) of int64."""
        h = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


# ---- the training --------------------------------------------------------------------------------------------------


def make_optimizer(model, args):
    """AdamW: matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def make_scheduler(optimizer, total):
    """A tenth of all updates warms up, then half a cosine goes down to a tenth of the rate."""
    warmup = max(1, total // 10)

    def factor(update):
        if update < warmup:
            return (update + 1) / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model, data, args):
    """Mean loss over windows of the held-out text, always the same ones."""
    model.eval()
    windows = data[: len(data) // (args.context + 1) * (args.context + 1)].view(-1, args.context + 1)
    batches = windows[: 8 * args.batch].long().to(args.device).split(args.batch)
    losses = [model(batch[:, :-1], batch[:, 1:]).item() for batch in batches]
    return sum(losses) / len(losses)


class Watch:
    """What may follow a run from outside; ``lightck demo`` does. By itself it does nothing."""

    def started(self, session, seconds):
        """``session`` is None without lightck; ``seconds`` is what ``attach`` took."""

    def updated(self, step, loss):
        """The optimizer's step number ``step`` has just returned."""

    def ended(self, model, optimizer, scheduler):
        """The last update and evaluation are done."""


def main(argv=None, watch=None):
    args = parse_args(argv)
    watch = watch or Watch()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    random.seed(args.seed)

    train_data, held_out = read_text(args)
    model = GPT(args.layers, args.width, args.heads, args.context, args.dropout).to(args.device)
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, total=args.epochs * args.updates)
    windows = Windows(train_data, args.updates * args.accumulate * args.batch, args.context)
    loader = DataLoader(windows, args.batch, shuffle=True, num_workers=args.workers)

    session, step, seconds = None, 0, 0.0
    loader.epoch = loader.start = 0  # where training begins; the session's loader has both from the checkpoint
    if args.pool != "none":
        import lightck

        began = time.perf_counter()
        session = lightck.attach(model, args.pool, resume=True, backend=args.backend)
        seconds = time.perf_counter() - began
        loader = session.loader(loader)
        step = session.step
        if step:
            print(f"resumed at step {step} in {seconds:.2f} s", flush=True)
    watch.started(session, seconds)

    for epoch in range(loader.epoch, args.epochs):
        model.train()
        total = 0.0
        for i, (x, y) in enumerate(loader, loader.start):
            loss = model(x.to(args.device), y.to(args.device)) / args.accumulate
            loss.backward()
            total += loss.detach()
            if (i + 1) % args.accumulate:  # i goes on in mid-epoch, so a resumed run accumulates the same batches
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            watch.updated(step, float(total))
            if step % args.print_every == 0:
                print(f"step {step:5d}  loss {total:.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            scheduler.step()
            optimizer.zero_grad()
            total = 0.0
        print(f"epoch {epoch + 1:4d}  held-out loss {evaluate(model, held_out, args):.4f}", flush=True)

    watch.ended(model, optimizer, scheduler)
    if session:
        session.close(done=True)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pool", default="gpt.pool", help='where checkpoints go (gpt.pool); "none" trains without lightck')
    add("--backend", default="auto", choices=["auto", "file", "pmdk"], help="what kind of pool (auto)")
    add("--epochs", type=int, default=5, help="passes (5)")
    add("--updates", type=int, default=100, help="updates in a pass (100)")
    add("--batch", type=int, default=8, help="windows in a micro-batch (8)")
    add("--accumulate", type=int, default=2, help="micro-batches in an update (2)")
    add("--layers", type=int, default=4, help="blocks (4)")
    add("--width", type=int, default=256, help="size of the embedding (256)")
    add("--heads", type=int, default=4, help="attention heads (4)")
    add("--context", type=int, default=256, help="bytes in a window (256)")
    add("--dropout", type=float, default=0.1, help="dropout (0.1)")
    add("--lr", type=float, default=1e-3, help="largest learning rate (1e-3)")
    add("--text", type=Path, help="a file to train on instead of the standard library")
    add("--bytes", type=int, default=2_000_000, help="bytes of text to read at most (2000000)")
    add("--workers", type=int, default=2, help="worker processes of the loader (2)")
    add("--threads", type=int, default=0, help="threads that PyTorch computes with (0: as many as it likes)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--seed", type=int, default=0, help="seed of everything random (0)")
    add("--print-every", type=int, default=10, metavar="N", help="print the loss at every N-th update (10)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

"""Fine-tune a small GPT with a frozen base and low-rank adapters, and see how few bytes a checkpoint then writes.

    python examples/train_gpt.py --pool gpt.pool --epochs 1           # a base (without --base: random weights)
    python examples/finetune_lora.py --base gpt.pool                  # kill it whenever you like ...
    python examples/finetune_lora.py --base gpt.pool                  # ... and run it again

It needs torch, numpy and lightck.

The base is read out of the other training's pool. What is frozen is written once into each slot, and later checkpoints
do not write it again. Each checkpoint still holds the whole model: ``lightck.recover("lora.pool")`` needs no base.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from train_gpt import GPT, Windows, standard_library


class LowRank(nn.Module):
    """A frozen linear layer plus a trained correction of rank ``rank`` (Hu et al., LoRA, 2021)."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))  # zero: training starts at the base

    def forward(self, x):
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale


def with_adapters(model, rank, alpha):
    """Freeze everything and put an adapter around each attention and MLP matrix."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.proj = LowRank(block.qkv, rank, alpha), LowRank(block.proj, rank, alpha)
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0], rank, alpha), LowRank(block.mlp[2], rank, alpha)
    return model


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    import lightck

    model = GPT(args.layers, args.width, args.heads, args.context, dropout=0.0)
    if args.base:
        base = lightck.recover(args.base, model)
        print(f"base: step {base.step} of {args.base}")
    with_adapters(model, args.rank, args.alpha)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)

    text = torch.frombuffer(bytearray(read_text(args)), dtype=torch.uint8)
    windows = Windows(text, args.updates * args.batch, args.context)
    session = lightck.attach(model, args.pool, resume=True)
    loader = session.loader(DataLoader(windows, args.batch, shuffle=True))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"{size / 1e6:.2f} MB of parameters, {sum(p.numel() for p in trained) * 4 / 1e6:.2f} MB of them are trained")
    if session.step:
        print(f"resumed at step {session.step}", flush=True)

    written = session.stats().bytes_written
    for _ in range(loader.epoch, 1):
        for x, y in loader:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step % args.print_every == 0:
                now = session.stats().bytes_written
                each, written = (now - written) / args.print_every, now
                print(f"step {session.step:4d}  loss {loss:.4f}  {each / 1e6:.3f} MB per checkpoint", flush=True)
    session.close(done=True)
    print(f"{args.pool} holds all {len(lightck.recover(args.pool).model)} tensors of step {session.step}")


def read_text(args):
    """What the base has not seen: by default the end of the standard library, or a file."""
    return args.text.read_bytes() if args.text else standard_library(4_000_000)[-500_000:]


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pool", default="lora.pool", help="where checkpoints go (lora.pool)")
    add("--base", help="pool of a training with examples/train_gpt.py of the same size")
    add("--updates", type=int, default=200, help="updates (200)")
    add("--batch", type=int, default=8, help="windows in a batch (8)")
    add("--rank", type=int, default=8, help="rank of the adapters (8)")
    add("--alpha", type=float, default=16.0, help="weight of the adapters: alpha / rank (16)")
    add("--layers", type=int, default=4, help="blocks (4)")
    add("--width", type=int, default=256, help="size of the embedding (256)")
    add("--heads", type=int, default=4, help="attention heads (4)")
    add("--context", type=int, default=256, help="bytes in a window (256)")
    add("--lr", type=float, default=2e-3, help="learning rate (2e-3)")
    add("--text", type=Path, help="a file to train on instead")
    add("--seed", type=int, default=0, help="seed of everything random (0)")
    add("--print-every", type=int, default=10, metavar="N", help="print at every N-th update (10)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

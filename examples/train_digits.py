"""Train a small convolutional network with BatchNorm on scikit-learn's handwritten digits (8 x 8 pixels).

    python examples/train_digits.py              # kill it whenever you like ...
    python examples/train_digits.py              # ... and run it again: it continues from the step it had reached
    python examples/train_digits.py --pool none  # the same training without lightck, which is then never imported

It needs torch, scikit-learn and lightck.

SGD with momentum, a step-wise schedule, random shifts as augmentation, accuracy on held-out digits after each pass. A
run that was killed ends with the same bits as one that was not: the digest at the end says so.
"""

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def read_digits():
    """Training and held-out sets of (image, label): (n, 1, 8, 8) of float32 in 0..1, and int64."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the same split in every run
    train, held_out = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def shifted(images):
    """Each batch moved by up to one pixel: augmentation that draws from the global generator, which is saved too."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(images, (down, right), dims=(2, 3))


def make_model():
    def block(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    return nn.Sequential(
        block(1, 32),
        block(32, 64),
        nn.MaxPool2d(2),
        block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    images, labels = dataset.tensors
    right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def digest(model):
    """Parameters and buffers in 12 hexadecimal digits."""
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(tensor.numpy().tobytes())
    return state.hexdigest()[:12]


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    train_set, held_out = read_digits()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, args.epochs // 3), gamma=0.3)
    loader = DataLoader(train_set, args.batch, shuffle=True)

    session = None
    loader.epoch = 0  # where training begins; the session's loader has it from the checkpoint
    if args.pool != "none":
        import lightck

        session = lightck.attach(model, args.pool, resume=True)  # finds optimizer and scheduler by itself
        loader = session.loader(loader)
        if session.step:
            print(f"resumed at step {session.step}", flush=True)

    for epoch in range(loader.epoch, args.epochs):
        model.train()
        loss = None  # a pass that a kill ended right after its last step is resumed with no batch left
        for images, labels in loader:
            loss = F.cross_entropy(model(shifted(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        last = f"loss {loss.item():.4f}" if loss is not None else "finished before"
        print(f"epoch {epoch + 1:3d}  {last}  held out {accuracy(model, held_out):.1%}", flush=True)

    if session:
        session.close(done=True)
    print("weights", digest(model))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pool", default="digits.pool", help='where checkpoints go (digits.pool); "none" trains without lightck')
    add("--epochs", type=int, default=12, help="passes (12)")
    add("--batch", type=int, default=64, help="digits in a batch (64)")
    add("--lr", type=float, default=0.1, help="first learning rate (0.1)")
    add("--seed", type=int, default=0, help="seed of everything random (0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

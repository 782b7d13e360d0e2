"""A loop with Accelerate: prepared objects, accumulation, a scheduler, random transforms in the process."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F

lightck = None
# started

EPOCHS = 3


class Noisy(torch.utils.data.Dataset):
    """Augments with the global generator, in the process that trains."""

    def __init__(self, count):
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), self.inputs[index, :3].argmax()


set_seed(4)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = torch.utils.data.DataLoader(Noisy(48), 4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
session, first = None, 0
if lightck is not None:
    session = lightck.attach(model, "run.pool", resume=True)
    loader = session.loader(loader)
    first = loader.epoch
for _epoch in range(first, EPOCHS):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        model(torch.ones(2, 8))
        model.train()
if session is not None:
    session.close()
finished(model, [optimizer])  # noqa: F821

"""Fit handwritten digits with Lightning. Kill the program at any moment and start it again: it goes on.

pip install 'lightck[lightning,examples]'
python examples/fit_lightning.py run.pool
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightck.integrations.lightning import LightckCallback


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
images, labels = load_digits(return_X_y=True)
rows = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, val = random_split(rows, [1500, len(rows) - 1500])
trainer = L.Trainer(
    max_epochs=8, accelerator="cpu", enable_progress_bar=False, callbacks=[LightckCallback(sys.argv[1])]
)
trainer.fit(Digits(), DataLoader(train, 16, shuffle=True), DataLoader(val, 64))
print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")

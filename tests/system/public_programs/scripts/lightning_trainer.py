"""A LightningModule with dropout, a scheduler and a validation loader, under the Trainer of Lightning."""

import logging
import sys

import lightning
import torch
from torch.nn import functional as F

lightck = None
# started

EPOCHS = 3
how = " ".join(sys.argv[1:])
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 3),
        )
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def training_step(self, batch, index):
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch, index):
        inputs, labels = batch
        self.log("loss", F.cross_entropy(self.net(inputs), labels))

    def on_train_epoch_end(self):
        if how == "own scheduler":
            self.scheduler.step()

    def configure_optimizers(self):
        if how == "own scheduler":
            return self.optimizer
        return {"optimizer": self.optimizer, "lr_scheduler": self.scheduler}


def loader(count, shuffle):
    draw = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 8, generator=draw)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1)), 4, shuffle=shuffle
    )


lightning.seed_everything(3, verbose=False)
module = Classifier()
training, validation, done = loader(32, True), loader(12, False), 0
if lightck is not None:
    session = lightck.attach(module, "run.pool", resume=True)
    training = session.loader(training)
    done = training.epoch
trainer = lightning.Trainer(
    max_epochs=EPOCHS - done,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=2,
)
if done < EPOCHS:
    trainer.fit(module, training, validation)
if lightck is not None:
    session.close()
finished(module, [module.optimizer])  # noqa: F821

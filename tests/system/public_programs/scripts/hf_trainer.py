"""A tiny GPT-2 under the Trainer of transformers. ``callback`` or ``loader``: how lightck is wired."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, get_scheduler

lightck = None
# started

EPOCHS, BATCH = 2, 4
how = sys.argv[1]


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(count))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Attach(TrainerCallback):
    session = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        self.session = lightck.attach(model, "run.pool", resume=True)
        state.global_step = self.session.step

    def on_train_end(self, args, state, control, **others):
        self.session.close()


class Wrapped(Trainer):
    session_loader = None

    def get_train_dataloader(self):
        self.session_loader = self.session_loader or session.loader(super().get_train_dataloader())
        return self.session_loader


torch.manual_seed(5)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
data = Sentences(32)
settings = {
    "output_dir": "out",
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "eval_strategy": "epoch",
    "logging_steps": 3,
    "disable_tqdm": True,
    "seed": 5,
}
updates = EPOCHS * len(data) // BATCH
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=updates)
both = {"model": model, "train_dataset": data, "eval_dataset": Sentences(8), "optimizers": (optimizer, scheduler)}
if how == "callback":
    callbacks = [Attach()] if lightck else []
    trainer = Trainer(args=TrainingArguments(num_train_epochs=EPOCHS, **settings), callbacks=callbacks, **both)
    trainer.train()
elif lightck is None:
    Trainer(args=TrainingArguments(num_train_epochs=EPOCHS, **settings), **both).train()
else:
    session = lightck.attach(model, "run.pool", resume=True)
    trainer = Wrapped(args=TrainingArguments(num_train_epochs=EPOCHS, **settings), **both)
    done = trainer.get_train_dataloader().epoch
    trainer.args.num_train_epochs = EPOCHS - done
    if done < EPOCHS:
        trainer.train()
    session.close()
finished(model, [optimizer])  # noqa: F821

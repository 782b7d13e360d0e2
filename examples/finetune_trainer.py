"""Train a tiny GPT-2 under the Trainer of Hugging Face, and go on after a kill as if nothing had happened.

    pip install 'lightck[transformers]'
    python examples/finetune_trainer.py              # kill it whenever you like ...
    python examples/finetune_trainer.py              # ... and run it again

Two lines are lightck's. The text is this file, so nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import lightck.integrations.transformers


class Text(torch.utils.data.Dataset):
    """Overlapping pieces of a file, as bytes."""

    def __init__(self, path, length=32):
        self.ids = torch.tensor(list(Path(path).read_bytes()))
        self.length = length

    def __len__(self):
        return (len(self.ids) - self.length) // 8

    def __getitem__(self, index):
        piece = self.ids[8 * index : 8 * index + self.length]
        return {"input_ids": piece, "labels": piece}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", default="trainer.pool", help="the pool's file (trainer.pool)")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    data = Text(__file__)
    args = TrainingArguments(
        "trainer-out",
        num_train_epochs=given.epochs,
        per_device_train_batch_size=8,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(32)))
    lightck.integrations.transformers.attach(trainer, given.pool)
    output = trainer.train()
    print(f"step {output.global_step}, mean loss {output.training_loss:.4f}")


if __name__ == "__main__":
    main()

"""A tiny GPT-2 fine-tuned by TRL's SFTTrainer on made-up words, with a tokenizer made here."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_scheduler
from trl import SFTConfig, SFTTrainer

lightck = None
# started

EPOCHS, BATCH = 2, 4
words = [f"w{n}" for n in range(60)]
plain = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{word: n + 2 for n, word in enumerate(words)}}, "<pad>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
draw = torch.Generator().manual_seed(2)
texts = [" ".join(words[int(n)] for n in torch.randint(60, (10,), generator=draw)) for _ in range(32)]
data = Dataset.from_dict({"text": texts})


class Wrapped(SFTTrainer):
    session_loader = None

    def get_train_dataloader(self):
        self.session_loader = self.session_loader or session.loader(super().get_train_dataloader())
        return self.session_loader


torch.manual_seed(5)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=3, num_training_steps=EPOCHS * len(texts) // BATCH)
config = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    num_train_epochs=EPOCHS,
    use_cpu=True,
    report_to=[],
    max_length=16,
    save_strategy="no",
    disable_tqdm=True,
    seed=5,
    bf16=False,
    gradient_checkpointing=False,
    dataset_num_proc=None,
)
both = {
    "model": model,
    "args": config,
    "train_dataset": data,
    "processing_class": tokenizer,
    "optimizers": (optimizer, scheduler),
}
if lightck is None:
    SFTTrainer(**both).train()
else:
    session = lightck.attach(model, "run.pool", resume=True)
    trainer = Wrapped(**both)
    done = trainer.get_train_dataloader().epoch
    trainer.args.num_train_epochs = EPOCHS - done
    if done < EPOCHS:
        trainer.train()
    session.close()
finished(model, [optimizer])  # noqa: F821

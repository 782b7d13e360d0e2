"""Loops of language models: batches drawn by hand, fetched ahead, from a loader of the program's own."""

from __future__ import annotations

from .. import made_up
from ..edits import Edit, after, at_end, before, sub
from . import program

ATTACH = 'import lightck\nsession = lightck.attach(model, "run.pool", resume=True{more})'

# ---- nanoGPT

_NANO = (
    "--device=cpu --compile=False --dtype=float32 --eval_interval=4 --eval_iters=2 --block_size=16 --batch_size=4 "
    "--n_layer=2 --n_head=2 --n_embd=32 --max_iters=13 --lr_decay_iters=13 --warmup_iters=3 --dropout=0.1 "
    "--dataset=made --gradient_accumulation_steps=2"
)
_NANO_TAKE = ("train.py", "model.py", "configurator.py")
_NANO_LOOP = (
    sub("^while True:", "while iter_num <= max_iters:"),
    before(r"^if ddp:$", "session.close()", place=(3, 3)),
)
_END = after("^    local_iter_num \\+= 1", "session.end_step()")
_AHEAD = (
    "\nclass Ahead:\n"
    '    def state_dict(self): return {"X": X, "Y": Y}\n'
    "    def load_state_dict(self, state):\n"
    "        global X, Y\n"
    '        X, Y = state["X"], state["Y"]\n'
)
for _name, _wiring, _ours in (
    (
        "nanoGPT",
        "iter_num = session.step",
        (after("^checkpoint = None", ATTACH.format(more="") + "\niter_num = session.step"), *_NANO_LOOP),
    ),
    (
        "nanoGPT, end_step",
        "iter_num = session.step, end_step()",
        (after("^checkpoint = None", ATTACH.format(more="") + "\niter_num = session.step"), *_NANO_LOOP, _END),
    ),
    (
        "nanoGPT, batch in state",
        "the batch that was fetched ahead in state, end_step()",
        (
            after(
                r"^X, Y = get_batch\('train'\)",
                _AHEAD + ATTACH.format(more=', state={"ahead": Ahead()}') + "\niter_num = session.step",
            ),
            *_NANO_LOOP,
            _END,
        ),
    ),
):
    program(
        _name,
        _wiring,
        "karpathy/nanoGPT",
        "train.py",
        _NANO,
        take=_NANO_TAKE,
        common=(before(r"^if ddp:$", "finished(model, [optimizer])", place=(3, 3)),),
        ours=_ours,
        data=made_up.tokens("data/made", {"train.bin": 3000, "val.bin": 600}, 50, meta=True),
    )

# ---- minGPT

for _workers in (0, 2):
    program(
        f"minGPT, {_workers} workers",
        "session.loader in the trainer, iter_num = session.step",
        "karpathy/minGPT",
        "projects/chargpt/chargpt.py",
        "--model.model_type=None --model.n_layer=2 --model.n_head=2 --model.n_embd=32 --trainer.max_iters=14 "
        f"--trainer.batch_size=4 --trainer.num_workers={_workers} --data.block_size=16 --trainer.device=cpu",
        take=("mingpt", "projects/chargpt"),
        paths=("../..",),
        data=made_up.file("projects/chargpt/input.txt", "O God, O God! What a made up text this is. " * 40),
        common=(
            sub("% 500 == 0", "% 4 == 0"),
            sub(r"generate\(x, 500", "generate(x, 12"),
            at_end("    finished(model, [trainer.optimizer])"),
        ),
        ours=(
            before(
                r"^        data_iter = iter",
                ATTACH.format(more="") + "\ntrain_loader = session.loader(train_loader)\nself.iter_num = session.step",
                "mingpt/trainer.py",
            ),
            sub(r"while True:", "while self.iter_num < config.max_iters:", "mingpt/trainer.py"),
            at_end("        session.close()", "mingpt/trainer.py"),
        ),
    )

# ---- makemore

program(
    "makemore",
    "session.loader around the loader inside InfiniteDataLoader, step = session.step",
    "karpathy/makemore",
    "makemore.py",
    "--num-workers 0 --max-steps 14 --n-layer 2 --n-head 2 --n-embd 16 --batch-size 4 --type transformer",
    data=made_up.words("", {"names.txt": 90}, per_line=1),
    common=(
        sub("step % 500 == 0", "step % 4 == 0"),
        sub("step % 200 == 0", "step % 5 == 0"),
        at_end("    finished(model, [optimizer])"),
    ),
    ours=(
        before(r"^    # init dataloader", ATTACH.format(more="")),
        sub(r"self\.train_loader = (DataLoader\(.*\))", r"self.train_loader = session.loader(\1)"),
        sub("^    step = 0", "    step = session.step"),
        sub("^    while True:", "    while step < args.max_steps:"),
        at_end("    session.close()"),
    ),
)

# ---- build-nanogpt: a loader of its own

_TIKTOKEN = (
    "class _Encoding:\n"
    "    def encode(self, text): return [ord(c) % 64 for c in text][:6]\n"
    "    def decode(self, tokens): return ''.join(chr(65 + t % 26) for t in tokens)\n"
    "def get_encoding(name): return _Encoding()\n"
)
_HELLASWAG = (
    "import torch\n"
    "def iterate_examples(split): return [0, 1]\n"
    "def render_example(example):\n"
    "    tokens = (torch.arange(48).view(4, 12) + example) % 64\n"
    "    return None, tokens, torch.ones(4, 12), example\n"
)
_LITE_SMALL = (
    sub("total_batch_size = 524288", "total_batch_size = 64"),
    sub("^B = 64", "B = 2"),
    sub("^T = 1024", "T = 16"),
    sub("max_steps = 19073", "max_steps = 12"),
    sub("warmup_steps = 715", "warmup_steps = 3"),
    sub(r"GPTConfig\(vocab_size=50304\)", "GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32)"),
    sub("^    if step % 250 == 0", "    if step % 4 == 0"),
    sub("max_length = 32", "max_length = 12"),
    before(r"^if ddp:$", "finished(model, [optimizer])", place=(3, 3)),
)
_LITE_LOOP = (
    sub(r"range\(max_steps\)", "range(session.step, max_steps)"),
    before(r"^if ddp:$", "session.close()", place=(3, 3)),
)
_LITE_STATE = before(
    r"^    def reset\(self\):",
    "def state_dict(self):\n"
    "    return {'shard': self.current_shard, 'position': self.current_position}\n"
    "def load_state_dict(self, state):\n"
    "    self.current_shard, self.current_position = state['shard'], state['position']\n"
    "    self.tokens = load_tokens(self.shards[self.current_shard])\n",
)
_LITE_END = before(r"^    if device_type == \"cuda\":", "session.end_step()")


def _lite(more: str) -> Edit:
    return after(r"^optimizer = raw_model", ATTACH.format(more=more))


for _name, _wiring, _ours in (
    ("build-nanogpt", "range(session.step, max_steps)", (_lite(""), *_LITE_LOOP)),
    ("build-nanogpt, end_step", "range(session.step, max_steps), end_step()", (_lite(""), *_LITE_LOOP, _LITE_END)),
    (
        "build-nanogpt, loader in state",
        "the loader in state",
        (_LITE_STATE, _lite(", state={'data': train_loader}"), *_LITE_LOOP),
    ),
    (
        "build-nanogpt, loader in state, end_step",
        "the loader in state, end_step()",
        (_LITE_STATE, _lite(", state={'data': train_loader}"), *_LITE_LOOP, _LITE_END),
    ),
):
    program(
        _name,
        _wiring,
        "karpathy/build-nanogpt",
        "train_gpt2.py",
        take=("train_gpt2.py",),
        common=_LITE_SMALL,
        ours=_ours,
        data=made_up.several(
            made_up.tokens("edu_fineweb10B", {"train_0.npy": 300, "train_1.npy": 500, "val_0.npy": 900}, 64),
            made_up.file("tiktoken.py", _TIKTOKEN),
            made_up.file("hellaswag.py", _HELLASWAG),
        ),
    )

# ---- llama2.c: a generator over a loader, one batch ahead

_LLAMA = (
    "--device=cpu --compile=False --dtype=float32 --vocab_source=custom --vocab_size=64 --max_seq_len=16 --dim=32 "
    "--n_layers=2 --n_heads=2 --n_kv_heads=2 --multiple_of=8 --batch_size=4 --gradient_accumulation_steps=2 "
    "--max_iters=13 --warmup_iters=3 --eval_interval=4 --eval_iters=2 --dropout=0.1"
)
_LLAMA_ATTACH = after("^checkpoint = None", ATTACH.format(more="") + "\niter_num = session.step")
for _name, _wiring, _more in (
    ("llama2.c", "iter_num = session.step", ()),
    (
        "llama2.c, session.loader",
        "iter_num = session.step, session.loader around the training loader",
        (
            sub(r"^        for x, y in dl:", "        for x, y in wrap(dl):", "tinystories.py"),
            sub(r"def iter_batches\(", "def iter_batches(wrap, ", "tinystories.py"),
            sub(r"^        batch_iter = iter_batches\(", "        batch_iter = iter_batches(lambda dl: dl, "),
            sub(r"^train_batch_iter = iter_batches\(", "train_batch_iter = iter_batches(session.loader, "),
        ),
    ),
):
    program(
        _name,
        _wiring,
        "karpathy/llama2.c",
        "train.py",
        _LLAMA,
        take=("train.py", "tinystories.py", "model.py", "export.py", "configurator.py"),
        data=made_up.several(
            made_up.tokens("data/tok64", {f"data{n:02d}.bin": 700 for n in range(3)}, 64),
            made_up.file("tokenizer.py", "Tokenizer = None\n"),
            made_up.file("sentencepiece.py", ""),
        ),
        common=(before(r"^if ddp:$", "finished(model, [optimizer])", place=(3, 3)),),
        ours=(_LLAMA_ATTACH, *_NANO_LOOP, *_more),
    )

"""Programs around a library: timm's script, Accelerate's example, scripts of ours with trainers' public names."""

from __future__ import annotations

from .. import made_up
from ..edits import after, before, sub
from . import program

_IMAGES = {"train/a": 14, "train/b": 14, "validation/a": 4, "validation/b": 4}
_TIMM = (
    "--data-dir made --model test_resnet --num-classes 2 --img-size 32 -b 4 -vb 4 --epochs 2 --device cpu --output out "
    "--experiment run --model-ema --reprob 0.3 --cooldown-epochs 0 --opt adamw --lr 0.01 "
)
_TIMM_OURS = (
    before(
        "^    results = \\[\\]",
        "import lightck\n"
        'session = lightck.attach(model, "run.pool", resume=True, optimizer=optimizer, '
        'state={"lr_scheduler": lr_scheduler, "ema": task.get_trainable_module(ema=True)})\n'
        "loader_train = session.loader(loader_train)\n"
        "start_epoch = loader_train.epoch",
    ),
    sub(r"enumerate\(loader\)", "enumerate(loader, loader.start)", place=(1, 2)),
    before("^    if best_metric is not None:", "session.close()"),
)
for _name, _wiring, _argv, _more in (
    ("timm", "as the README, scheduler and EMA in state", "--workers 1 --warmup-epochs 0", ()),
    ("timm, 2 workers", "as the README, scheduler and EMA in state", "--workers 2 --warmup-epochs 0", ()),
    (
        "timm, rate by updates",
        "as above; num_updates begins with the epoch, as timm has it",
        "--workers 1 --warmup-epochs 1 --sched-on-updates",
        (),
    ),
    (
        "timm, rate by updates, counted from start",
        "as above, num_updates from loader.start",
        "--workers 1 --warmup-epochs 1 --sched-on-updates",
        (sub(r"num_updates = epoch \* updates_per_epoch", "num_updates = epoch * updates_per_epoch + loader.start"),),
    ),
):
    program(
        _name,
        _wiring,
        "huggingface/pytorch-image-models",
        "train.py",
        _TIMM + _argv,
        take=("train.py", "timm"),
        common=(before("^    if best_metric is not None:", "finished(model, [optimizer])"),),
        ours=(*_TIMM_OURS, *_more),
        data=made_up.pictures("made", _IMAGES),
        seconds=120,
    )

program(
    "accelerate cv_example",
    "as the README: session.loader around what prepare() returns",
    "huggingface/accelerate",
    "examples/cv_example.py",
    "--data_dir made --cpu",
    take=("examples/cv_example.py",),
    common=(
        sub('"num_epochs": 3', '"num_epochs": 2'),
        sub('"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 32'),
        sub('"resnet50d", pretrained=True', '"test_resnet", pretrained=False'),
        sub("num_workers=4", "num_workers=0", place=(1, 2)),
        sub("num_workers=4", "num_workers=0"),
        before(r"^    accelerator\.end_training\(\)", "finished(model, [optimizer])"),
    ),
    ours=(
        before(
            "^    # Now we train the model",
            'import lightck\nsession = lightck.attach(model, "run.pool", resume=True)\n'
            "train_dataloader = session.loader(train_dataloader)",
        ),
        sub(r"range\(num_epochs\)", "range(train_dataloader.epoch, num_epochs)"),
        sub(r"enumerate\(train_dataloader\)", "enumerate(train_dataloader, train_dataloader.start)"),
        before(r"^    accelerator\.end_training\(\)", "session.close()"),
    ),
    data=made_up.pictures("examples/made", {"": 40}, kind="jpg", name="pet{r}_{n}"),
)

_STARTED = "# started"
for _script, _wirings in {
    "hf_trainer": {
        "callback": "attach and global_step in on_train_begin",
        "loader": "get_train_dataloader wrapped, epochs counted down",
    },
    "lightning_trainer": {
        "loader": "session.loader given to fit, max_epochs counted down",
        "own scheduler": "as above; the module steps its scheduler at the end of an epoch",
    },
    "trl_sft": {"loader": "get_train_dataloader wrapped, epochs counted down"},
    "accelerate_loop": {"loader": "as the README, accumulate(), scheduler"},
}.items():
    for _how, _wiring in _wirings.items():
        program(
            f"{_script}, {_how}",
            _wiring,
            "",
            f"{_script}.py",
            _how,
            seconds=120,
            ours=(after(_STARTED, "import lightck"),),
        )

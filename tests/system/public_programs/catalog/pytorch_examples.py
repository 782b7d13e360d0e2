"""pytorch/examples: loops over a DataLoader, and over something else."""

from __future__ import annotations

from .. import made_up
from ..edits import after, at_end, before, sub
from . import program

EXAMPLES = "pytorch/examples"
README = "as the README: session.loader, loader.epoch, loader.start"
ATTACH = 'import lightck\nsession = lightck.attach(model, "run.pool", resume=True)'
LOADER = f"{ATTACH}\ntrain_loader = session.loader(train_loader)"

# ---- loops over a DataLoader

_EPOCHS_AND_BATCHES = (
    sub(r"range\(1, args\.epochs \+ 1\)", "range(train_loader.epoch + 1, args.epochs + 1)"),
    sub(r"enumerate\(train_loader\)", "enumerate(train_loader, train_loader.start)"),
)
_IN_MAIN = (
    after(r"^    scheduler = StepLR", LOADER),
    *_EPOCHS_AND_BATCHES,
    before("if args.save_model:", "session.close()"),
)
_REPORT = (before("if args.save_model:", "finished(model, [optimizer])"),)

program(
    "mnist",
    README,
    EXAMPLES,
    "mnist/main.py",
    "--no-accel --batch-size 16 --test-batch-size 16 --epochs 3",
    data=made_up.mnist("data"),
    common=_REPORT,
    ours=_IN_MAIN,
)
program(
    "mnist_rnn",
    README,
    EXAMPLES,
    "mnist_rnn/main.py",
    "--batch-size 16 --test-batch-size 16 --epochs 3",
    data=made_up.mnist("data"),
    common=_REPORT,
    ours=_IN_MAIN,
)
program(
    "siamese_network",
    README,
    EXAMPLES,
    "siamese_network/main.py",
    "--no-accel --batch-size 4 --test-batch-size 4 --epochs 2",
    data=made_up.mnist("data", 20, 20),
    common=_REPORT,
    ours=_IN_MAIN,
)
program(
    "vae",
    README,
    EXAMPLES,
    "vae/main.py",
    "--no-accel --batch-size 16 --epochs 3",
    data=made_up.several(made_up.mnist("data"), made_up.file("vae/results/keep", "")),
    common=(at_end("finished(model, [optimizer])"),),
    ours=(after("^optimizer = optim", LOADER), *_EPOCHS_AND_BATCHES, at_end("session.close()")),
)
program(
    "dcgan",
    "as the README; both networks in one ModuleList",
    EXAMPLES,
    "dcgan/main.py",
    "--dataset fake --ngf 4 --ndf 4 --nz 8 --batchSize 6 --niter 2 --workers 0 --manualSeed 3",
    common=(
        sub(r"dset\.FakeData\(", "dset.FakeData(size=48, "),
        at_end("finished(nn.ModuleList([netG, netD]), [optimizerD, optimizerG])"),
    ),
    ours=(
        before(
            "^if opt.dry_run:",
            'import lightck\nsession = lightck.attach(nn.ModuleList([netG, netD]), "run.pool", '
            "resume=True)\ndataloader = session.loader(dataloader)",
        ),
        sub(r"range\(opt\.niter\)", "range(dataloader.epoch, opt.niter)"),
        sub(r"enumerate\(dataloader, 0\)", "enumerate(dataloader, dataloader.start)"),
        at_end("session.close()"),
    ),
)

for _name, _workers in (("imagenet", 0), ("imagenet, 2 workers", 2)):
    program(
        _name,
        README,
        EXAMPLES,
        "imagenet/main.py",
        f"--dummy -a shufflenet_v2_x0_5 -b 4 -j {_workers} --epochs 2 --seed 1 --no-accel",
        common=(
            sub(r"FakeData\(1281167, \(3, 224, 224\), 1000", "FakeData(32, (3, 64, 64), 1000"),
            sub(r"FakeData\(50000, \(3, 224, 224\), 1000", "FakeData(8, (3, 64, 64), 1000"),
            before(r"^def train\(", "    finished(model, [optimizer])"),
        ),
        ours=(
            before("^    if args.evaluate:", LOADER),
            sub(r"range\(args\.start_epoch, args\.epochs\)", "range(train_loader.epoch, args.epochs)"),
            sub(r"enumerate\(train_loader\)", "enumerate(train_loader, train_loader.start)"),
            before(r"^def train\(", "    session.close()"),
        ),
    )

for _name, _threads in (("super_resolution", 0), ("super_resolution, 2 workers", 2)):
    program(
        _name,
        README,
        EXAMPLES,
        "super_resolution/main.py",
        f"--upscale_factor 8 --batchSize 4 --testBatchSize 4 --nEpochs 2 --threads {_threads}",
        data=made_up.pictures("super_resolution/dataset/BSDS300/images", {"train": 32, "test": 8}, size=64),
        common=(at_end("finished(model, [optimizer])"),),
        ours=(
            after("^optimizer = optim", f"{ATTACH}\ntraining_data_loader = session.loader(training_data_loader)"),
            sub(r"range\(1, opt\.nEpochs \+ 1\)", "range(training_data_loader.epoch + 1, opt.nEpochs + 1)"),
            sub(
                r"enumerate\(training_data_loader, 1\)",
                "enumerate(training_data_loader, training_data_loader.start + 1)",
            ),
            at_end("session.close()"),
        ),
    )

program(
    "fast_neural_style",
    README,
    EXAMPLES,
    "fast_neural_style/neural_style/neural_style.py",
    "train --dataset made --style-image made/style/000.png --style-size 32 --image-size 32 --batch-size 2 --epochs 2 "
    "--save-model-dir out --checkpoint-model-dir out --checkpoint-interval 3 --log-interval 1",
    data=made_up.pictures("fast_neural_style/neural_style/made", {"style": 4, "other": 12}),
    common=(
        sub(
            r"models\.vgg16\(weights=.*\)\.features",
            "models.vgg16(weights=None).features",
            "fast_neural_style/neural_style/vgg.py",
        ),
        after("^from PIL import Image", "Image.ANTIALIAS = Image.LANCZOS", "fast_neural_style/neural_style/utils.py"),
        before("^    # save model", "finished(transformer, [optimizer])"),
    ),
    ours=(
        before(
            r"^    for e in range",
            'import lightck\nsession = lightck.attach(transformer, "run.pool", resume=True)\n'
            "train_loader = session.loader(train_loader)",
        ),
        sub(r"range\(args\.epochs\)", "range(train_loader.epoch, args.epochs)"),
        sub(r"enumerate\(train_loader\)", "enumerate(train_loader, train_loader.start)"),
        before("^    # save model", "session.close()"),
    ),
)

# ---- loops of their own

_CORA = r"with requests\.get\("
_STEPS = "session.step; a step ends at the next training forward"

program(
    "gcn",
    _STEPS,
    EXAMPLES,
    "gcn/main.py",
    "--epochs 14 --no-accel",
    data=made_up.cora("gcn/cora"),
    common=(
        sub(rf"{_CORA}.*", "if False:"),
        sub(r"idx\[:1000\], idx\[1000:1500\], idx\[1500:\]", "idx[:20], idx[20:35], idx[35:]"),
        at_end("    finished(gcn, [optimizer])"),
    ),
    ours=(
        after("^    optimizer = Adam", 'import lightck\nsession = lightck.attach(gcn, "run.pool", resume=True)'),
        sub(r"range\(args\.epochs\)", "range(session.step, args.epochs)"),
        at_end("    session.close()"),
    ),
)
program(
    "gat",
    _STEPS,
    EXAMPLES,
    "gat/main.py",
    "--epochs 14 --no-accel",
    data=made_up.cora("gat/cora"),
    common=(
        sub(r"idx\[:1200\], idx\[1200:1600\], idx\[1600:\]", "idx[:20], idx[20:35], idx[35:]"),
        at_end("    finished(gat_net, [optimizer])"),
    ),
    ours=(
        after("^    optimizer = Adam", 'import lightck\nsession = lightck.attach(gat_net, "run.pool", resume=True)'),
        sub(r"range\(args\.epochs\)", "range(session.step, args.epochs)"),
        at_end("    session.close()"),
    ),
)

for _name, _wiring, _end in (
    ("time_sequence_prediction", "session.step", ()),
    (
        "time_sequence_prediction, end_step",
        "session.step, end_step()",
        (after(r"plt\.close\(\)", "session.end_step()"),),
    ),
):
    program(
        _name,
        _wiring,
        EXAMPLES,
        "time_sequence_prediction/train.py",
        "--steps 6",
        data=made_up.waves("time_sequence_prediction/traindata.pt"),
        common=(
            sub(r"torch\.load\('traindata\.pt'\)", "torch.load('traindata.pt', weights_only=False)"),
            sub("future = 1000", "future = 5"),
            sub(r"plt\.figure\(.*\)", "plt.figure()"),
            sub(r"plt\.savefig\(.*\)", "pass"),
            at_end("    finished(seq, [optimizer])"),
        ),
        ours=(
            after(r"^    optimizer = optim", 'import lightck\nsession = lightck.attach(seq, "run.pool", resume=True)'),
            sub(r"range\(opt\.steps\)", "range(session.step, opt.steps)"),
            *_end,
            at_end("    session.close()"),
        ),
    )

_REGRESSION = (
    before("^POLY_DEGREE", "torch.manual_seed(7)"),
    sub(r"count\(1\)", "range(1, 41)"),
    at_end("finished(fc)"),
)
for _name, _wiring, _end in (
    ("regression", "session.step", ()),
    ("regression, end_step", "session.step, end_step()", (before("# Stop criterion", "session.end_step()"),)),
):
    program(
        _name,
        _wiring,
        EXAMPLES,
        "regression/main.py",
        common=_REGRESSION,
        ours=(
            after("^fc = torch", 'import lightck\nsession = lightck.attach(fc, "run.pool", resume=True)'),
            sub(r"range\(1, 41\)", "range(session.step + 1, 41)"),
            *_end,
            at_end("session.close()"),
        ),
    )

_FORWARD_FORWARD = (
    before(r"^    net = Net\(", "torch.manual_seed(args.seed)"),
    sub(r"Net\(\[784, 500, 500\]\)", "Net([784, 64, 64])"),
    at_end("    finished(nn.ModuleList(net.layers), [layer.opt for layer in net.layers])"),
)
_FF_ATTACH = 'import lightck\nsession = lightck.attach({model}, "run.pool", resume=True)'
_FF_LAYERS = (
    before(r"^    net\.train\(x_pos", _FF_ATTACH.format(model="nn.ModuleList(net.layers)")),
    after("training layer: ", "layer.before = i * layer.num_epochs"),
    sub(
        r"range\(self\.num_epochs\)",
        "range(min(self.num_epochs, max(0, session.iteration - self.before)), self.num_epochs)",
    ),
)
for _name, _wiring, _ours in (
    ("mnist_forward_forward", "attach(net)", (before(r"^    net\.train\(x_pos", _FF_ATTACH.format(model="net")),)),
    ("mnist_forward_forward, layers", "attach(ModuleList(layers)), session.iteration", _FF_LAYERS),
    (
        "mnist_forward_forward, layers, end_step",
        "attach(ModuleList(layers)), session.iteration, end_step()",
        (*_FF_LAYERS, after(r"self\.opt\.step\(\)", "session.end_step()")),
    ),
):
    program(
        _name,
        _wiring,
        EXAMPLES,
        "mnist_forward_forward/main.py",
        "--epochs 120 --train_size 40 --test_size 16 --log-interval 60",
        common=_FORWARD_FORWARD,
        data=made_up.mnist("mnist_forward_forward/data", 40, 16),
        ours=(*_ours, at_end("    session.close()")),
    )

# ---- a language model whose hidden state is carried along

_WORDS = "--epochs 3 --batch_size 4 --bptt 6 --emsize 16 --nhid 16 --log-interval 5"
_PER_EPOCH = "len(range(0, train_data.size(0) - 1, args.bptt))"
_WLM = (
    before("^# Loop over epochs", f"{ATTACH}\nper_epoch = {_PER_EPOCH}"),
    sub(r"range\(1, args\.epochs\+1\)", "range(session.step // per_epoch + 1, args.epochs + 1)"),
    sub(
        r"in enumerate\(range\(0, train_data\.size\(0\) - 1, args\.bptt\)\)",
        "in list(enumerate(range(0, train_data.size(0) - 1, args.bptt)))[session.step % per_epoch:]",
    ),
    before("^# Load the best saved model", "session.close()"),
)
_WLM_END = before(r"^        if batch % args\.log_interval == 0", "session.end_step()")
_WLM_HIDDEN = (
    before(
        "^# Loop over epochs",
        "class Hidden:\n"
        "    value = model.init_hidden(args.batch_size) if args.model != 'Transformer' else ()\n"
        "    def state_dict(self): return {'hidden': list(self.value)}\n"
        "    def load_state_dict(self, state): self.value = tuple(state['hidden'])\n"
        "carried = Hidden()",
    ),
    before(_WLM[0].at, _WLM[0].text.replace("resume=True", "resume=True, state={'hidden': carried}")),
    *_WLM[1:],
    after(
        r"^        hidden = model\.init_hidden\(args\.batch_size\)",
        "if session.step % per_epoch: hidden = carried.value",
    ),
    before(r"^        if batch % args\.log_interval == 0", "carried.value = repackage_hidden(hidden)"),
    _WLM_END,
)
for _name, _wiring, _argv, _ours in (
    ("word_language_model, no optimizer", "session.step", "", _WLM),
    ("word_language_model, no optimizer, end_step", "session.step, end_step()", "", (*_WLM, _WLM_END)),
    ("word_language_model", "session.step, end_step()", " --use-optimizer --lr 0.01", (*_WLM, _WLM_END)),
    (
        "word_language_model, hidden in state",
        "session.step, end_step(), state={'hidden': ...}",
        " --use-optimizer --lr 0.01",
        _WLM_HIDDEN,
    ),
    (
        "word_language_model, Transformer",
        "session.step, end_step()",
        " --use-optimizer --lr 0.01 --model Transformer",
        (*_WLM, _WLM_END),
    ),
):
    program(
        _name,
        _wiring,
        EXAMPLES,
        "word_language_model/main.py",
        _WORDS + _argv,
        ours=_ours,
        common=(before("^# Load the best saved model", "finished(model, [optimizer] if args.use_optimizer else [])"),),
        take=tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
        data=made_up.words("word_language_model/data/wikitext-2", {"train.txt": 200, "valid.txt": 80, "test.txt": 80}),
    )

"""Exported files: what other programs' own loaders make of them, against the live tensors."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn
from toys import BIG, adam, in_child, killed_child, net, pool_with, same, weights

import lightck

os.environ["HF_HUB_OFFLINE"] = "1"  # configs only: nothing is looked for in the network
import transformers

from lightck.errors import ExportError, ExportExistsError, PoolIOError, StateValueError
from lightck.export.atomic import atomic_file
from lightck.export.tensors import DTYPES

FORMATS = ["safetensors", "torch"]


def saved(model: nn.Module, pool: Path, **options: Any) -> lightck.Checkpoint:
    """A checkpoint of the model as it is."""
    with lightck.attach(model, pool, **options) as session:
        session.flush()
    return lightck.recover(pool)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


class Box:
    """An object in ``state`` that holds a value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


# -- the model -------------------------------------------------------------------------------------------------------


def test_safetensors_hold_the_state_dict(pool, folder):
    model, _ = pool_with(pool)
    path = folder / "model.safetensors"
    exported = lightck.export_checkpoint(lightck.recover(pool), path)
    assert same(safetensors.torch.load_file(path), weights(model))
    assert exported == lightck.Exported(str(path), path.stat().st_size, 4, {})
    assert metadata(path) == {"format": "pt", "lightck_step": "3"}
    other = net(seed=1)
    assert safetensors.torch.load_model(other, path) == (set(), [])
    assert same(weights(other), weights(model))


def test_torch_file_is_the_state_dict(pool, folder):
    model, _ = pool_with(pool)
    exported = lightck.export_checkpoint(lightck.recover(pool), folder / "model.pt", format="torch")
    loaded = torch.load(folder / "model.pt", weights_only=True)
    assert same(dict(loaded), weights(model))
    assert exported.tensors == 4
    net(seed=1).load_state_dict(loaded)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "untied"])
def test_transformers_load_what_was_exported(kind, pool, folder):
    torch.manual_seed(0)
    config = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2),
        "llama": lambda: llama_config(tie=True),
        "bert": lambda: transformers.BertConfig(
            vocab_size=17,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            architectures=["BertForMaskedLM"],
            is_decoder=True,
        ),
        "untied": lambda: llama_config(tie=False),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    exported = lightck.export_checkpoint(saved(model, pool), folder / "model.safetensors")
    expected = {
        "gpt2": {"lm_head.weight": "transformer.wte.weight"},
        "llama": {"lm_head.weight": "model.embed_tokens.weight"},
        "bert": {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        "untied": {},
    }[kind]
    assert exported.tied == expected
    assert json.loads(metadata(folder / "model.safetensors").get("lightck_tied", "{}")) == expected
    config.save_pretrained(folder)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert same(weights(loaded), weights(model))
    for alias, kept in expected.items():
        assert loaded.get_parameter(alias) is loaded.get_parameter(kept)


def llama_config(tie: bool) -> Any:
    return transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        tie_word_embeddings=tie,
    )


class HeadFirst(transformers.LlamaForCausalLM):
    """Its tied head is registered before the embedding: the name that is kept is not the one that is expected."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._modules = {"lm_head": self._modules["lm_head"], "model": self._modules["model"]}


def test_transformers_find_a_tied_weight_under_its_other_name(pool, folder):
    torch.manual_seed(0)
    config = llama_config(tie=True)
    model = HeadFirst(config)
    exported = lightck.export_checkpoint(saved(model, pool), folder / "model.safetensors")
    assert exported.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    config.save_pretrained(folder)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert same(weights(loaded), weights(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_tied_weights_are_stored_once_and_tied_again(pool, folder):
    def tied(seed: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        torch.manual_seed(seed)
        nn.init.normal_(model[0].weight)
        model[1].weight = model[0].weight
        return model

    model = tied(0)
    checkpoint = saved(model, pool)
    exported = lightck.export_checkpoint(checkpoint, folder / "model.safetensors")
    assert exported.tied == {"1.weight": "0.weight"}
    assert exported.tensors == 1
    assert list(safetensors.torch.load_file(folder / "model.safetensors")) == ["0.weight"]
    other = tied(1)
    safetensors.torch.load_model(other, folder / "model.safetensors")
    assert same(weights(other), weights(model))
    assert lightck.export_checkpoint(checkpoint, folder / "model.pt", format="torch").tensors == 1
    loaded = torch.load(folder / "model.pt", weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def test_layouts_are_exported_as_their_values(pool, folder):
    model = nn.Module()
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    model.register_buffer("last", base.contiguous(memory_format=torch.channels_last))
    model.register_buffer("turned", torch.arange(6).reshape(2, 3).t())
    model.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("odd", torch.tensor([True, False, True]))
    model.register_buffer("one", torch.arange(8.0)[5::7])
    lightck.export_checkpoint(saved(model, pool), folder / "model.safetensors")
    loaded = safetensors.torch.load_file(folder / "model.safetensors")
    assert same(loaded, weights(model))
    assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_every_dtype_is_exported_or_refused_by_name(pool, folder):
    model = nn.Module()
    known = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
    for dtype in known:
        bits = torch.arange(0, 8 * dtype.itemsize, dtype=torch.uint8) % 2
        model.register_buffer(f"b_{str(dtype)[6:]}", bits.view(dtype).reshape(2, 4))
    checkpoint = saved(model, pool)
    lightck.export_checkpoint(checkpoint, folder / "model.safetensors")
    assert same(safetensors.torch.load_file(folder / "model.safetensors"), weights(model))
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    checkpoint = saved(model, folder / "other.pool")
    with pytest.raises(StateValueError, match=r"'wide'.*complex128.*format=\"torch\""):
        lightck.export_checkpoint(checkpoint, folder / "wide.safetensors")
    assert not (folder / "wide.safetensors").exists()
    lightck.export_checkpoint(checkpoint, folder / "wide.pt", format="torch")
    assert same(dict(torch.load(folder / "wide.pt", weights_only=True)), weights(model))


def test_table_of_dtypes_is_that_of_the_library():
    theirs = {str(dtype)[6:]: name for name, dtype in safetensors.torch._TYPES.items() if dtype is not None}
    assert {name: theirs[name] for name in DTYPES if name in theirs} == {n: v for n, v in DTYPES.items() if n in theirs}
    missing = {name for name in theirs if name not in DTYPES and not name.startswith("float4")}
    assert not missing


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": torch.ones(3), "calls": 5}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_is_in_the_file(pool, folder):
    model = nn.Sequential(WithExtra(2, 2))
    checkpoint = saved(model, pool)
    lightck.export_checkpoint(checkpoint, folder / "model.pt", format="torch")
    other = nn.Sequential(WithExtra(2, 2))
    other.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    assert other[0].seen["calls"] == 5
    lightck.export_checkpoint(checkpoint, folder / "model.safetensors")
    extra = json.loads(metadata(folder / "model.safetensors")["lightck_extra_state"])
    assert extra == {"0._extra_state": {"scale": {"tensor": "0._extra_state/scale"}, "calls": 5}}
    assert same(safetensors.torch.load_file(folder / "model.safetensors")["0._extra_state/scale"], torch.ones(3))


# -- everything ------------------------------------------------------------------------------------------------------

VALUE = {
    "large": torch.arange(5000.0),
    "small": torch.arange(3),
    "array": np.arange(4, dtype=np.int16),
    "count": np.float64(2.5),
    "deque": deque([1, 2], maxlen=4),
    "counter": Counter("aab"),
    "ordered": OrderedDict(b=1, a=2),
    "tuple": (1, (2, 3)),
    "bytes": b"\x00\xff",
    "nan": float("nan"),
    "big": 1 << 100,
    7: {None, 1},
    "complex": np.complex128(1 + 2j),
    "complex nan": np.complex64(complex("nan")),
    "frozen": frozenset([1]),
}


def trained(pool: Path) -> tuple[nn.Module, Any]:
    return pool_with(pool, state={"box": Box(VALUE)})


def test_all_as_safetensors_has_tensors_by_parameter_name_and_the_rest_as_json(pool, folder):
    model, optimizer = trained(pool)
    path = folder / "all.safetensors"
    exported = lightck.export_checkpoint(lightck.recover(pool), path, what="all")
    loaded = safetensors.torch.load_file(path)
    assert exported.tensors == len(loaded)
    assert same({name: loaded[name] for name in weights(model)}, weights(model))
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            assert same(loaded[f"optimizer/{name}/{key}"], value), (name, key)
    rest = json.loads(metadata(path)["lightck_all"])
    assert rest["step"] == rest["iteration"] == 3
    (saved_optimizer,) = rest["optimizers"]
    assert saved_optimizer["class"] == "AdamW"
    assert saved_optimizer["groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert saved_optimizer["groups"][0]["lr"] == 0.05
    box = rest["state"]["box"]
    assert box["tuple"] == [1, [2, 3]]
    assert box["ordered"] == {"b": 1, "a": 2}
    assert box["nan"] == "nan"
    assert box["big"] == 1 << 100
    assert box["complex"] == [1.0, 2.0]
    assert box["complex nan"] == ["nan", 0.0]
    assert same(loaded[box["large"]["tensor"]], VALUE["large"])
    assert same(loaded[box["array"]["tensor"]], torch.from_numpy(VALUE["array"]))
    assert same(loaded[box["bytes"]["tensor"]], torch.tensor([0, 255], dtype=torch.uint8))
    assert same(loaded[rest["rng"]["torch"]["tensor"]], lightck.recover(pool).rng.torch)


def test_all_as_torch_loads_with_weights_only(pool, folder):
    model, optimizer = trained(pool)
    lightck.export_checkpoint(lightck.recover(pool), folder / "all.pt", format="torch", what="all")
    loaded = torch.load(folder / "all.pt", weights_only=True)
    assert same(dict(loaded["model"]), weights(model))
    assert same(loaded["optimizer"], optimizer.state_dict())
    assert loaded["optimizer_names"] == [[[name for name, _ in model.named_parameters()]]]
    assert loaded["step"] == 3
    box = loaded["state"]["box"]
    assert box["deque"] == [1, 2]
    assert box["counter"] == Counter("aab")
    assert list(box["ordered"]) == ["b", "a"]
    assert box[7] == {None, 1}
    assert box["complex"] == 1 + 2j
    assert box["bytes"] == b"\x00\xff"
    assert same(box["array"], torch.from_numpy(VALUE["array"]))
    again = net(seed=1)
    again_optimizer = adam(again)
    again.load_state_dict(loaded["model"])
    again_optimizer.load_state_dict(loaded["optimizer"])
    assert same(again_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        ({frozenset([1])}, {(1,)}),
        ({np.int8(1), np.float64(2.5), np.bool_(False)}, {1, 2.5, False}),
        ({(1, np.float32(2)), ((frozenset([3]),),)}, {(1, 2.0), (((3,),),)}),
        (frozenset([frozenset([np.int64(7)])]), ((7,),)),
        ({frozenset([1]): [{(np.int16(2),)}]}, {(1,): [{(2,)}]}),
        ([b"", {b""}, {b"": b"x"}], [b"", {b""}, {b"": b"x"}]),
        ((set(), frozenset()), (set(), ())),
    ],
)
def test_what_sets_hold_loads_with_weights_only(pool, folder, value, loaded):
    pool_with(pool, steps=1, state={"box": Box(value)})
    lightck.export_checkpoint(lightck.recover(pool), folder / "all.pt", format="torch", what="all")
    found = torch.load(folder / "all.pt", weights_only=True)["state"]["box"]
    assert found == loaded
    assert type(found) is type(loaded)


def test_all_of_several_optimizers_and_a_restored_checkpoint(pool, folder):
    model = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9), torch.optim.LBFGS(model[2].parameters())]
    with lightck.attach(model, pool, optimizer=optimizers) as session:
        session.flush()
    checkpoint = lightck.recover(pool, net(seed=1))
    for number, format in enumerate(FORMATS):
        lightck.export_checkpoint(checkpoint, folder / str(number), format=format, what="all")
    assert len(torch.load(folder / "1", weights_only=True)["optimizer"]) == 2
    classes = [o["class"] for o in json.loads(metadata(folder / "0")["lightck_all"])["optimizers"]]
    assert classes == ["SGD", "LBFGS"]


@pytest.mark.parametrize(
    ("value", "keys"),
    [({1: "int", "1": "str"}, "1 and '1'"), ({"deep": [{None: 5, "None": 6}]}, "None and 'None'")],
    ids=["number", "deep"],
)
def test_two_keys_that_are_one_in_json_are_reported(pool, folder, value, keys):
    checkpoint = saved(net(), pool, state={"box": Box(value)})
    with pytest.raises(StateValueError, match=rf"'state/box.* has the keys {keys}\..*format=\"torch\""):
        lightck.export_checkpoint(checkpoint, folder / "it", what="all")
    assert not (folder / "it").exists()
    lightck.export_checkpoint(checkpoint, folder / "it", what="all", format="torch")
    assert torch.load(folder / "it", weights_only=True)["state"]["box"] == value


def test_two_things_of_one_name_are_reported(pool, folder):
    model = nn.Module()
    for name in ("w", "optimizer/w/exp_avg"):
        model.register_parameter(name, nn.Parameter(torch.ones(2)))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    with pytest.raises(StateValueError, match=r"'optimizer/w/exp_avg'.*needs its own name"):
        lightck.export_checkpoint(lightck.recover(pool), folder / "all.safetensors", what="all")
    assert not (folder / "all.safetensors").exists()
    lightck.export_checkpoint(lightck.recover(pool), folder / "model.safetensors")


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_file_that_is_there_is_not_replaced_unasked(format, pool, folder):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    path = folder / "there"
    path.write_text("mine")
    with pytest.raises(ExportExistsError, match="overwrite=True") as caught:
        lightck.export_checkpoint(checkpoint, path, format=format)
    assert isinstance(caught.value, FileExistsError)
    assert path.read_text() == "mine"
    lightck.export_checkpoint(checkpoint, path, format=format, overwrite=True)
    assert path.stat().st_size > 100
    assert sorted(p.name for p in folder.iterdir()) == ["run.pool", "run.pool.lock", "there"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_pool_is_never_replaced(format, pool, folder):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    for overwrite in (False, True):
        with pytest.raises(ExportExistsError, match=r"is a pool.*no other file replaces it.*Choose another name"):
            lightck.export_checkpoint(checkpoint, pool, format=format, overwrite=overwrite)
    assert lightck.recover(pool).step == 3
    assert sorted(p.name for p in folder.iterdir()) == ["run.pool", "run.pool.lock"]


def test_a_pool_that_comes_during_the_export_is_not_replaced(pool, folder):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    read = checkpoint.tensor

    def slow(name: str) -> torch.Tensor:
        if not (folder / "it").exists():
            pool_with(folder / "it", steps=1)
        return read(name)

    checkpoint.tensor = slow  # type: ignore[method-assign]
    with pytest.raises(ExportExistsError, match="is a pool"):
        lightck.export_checkpoint(checkpoint, folder / "it", overwrite=True)
    assert lightck.recover(folder / "it").step == 1


def test_a_link_in_the_place_of_the_file_is_not_followed(pool, folder):
    pool_with(pool)
    target, elsewhere = folder / "model.safetensors", folder / "elsewhere"
    target.symlink_to(elsewhere)
    for overwrite in (False, True):  # replacing it would leave what it leads to as it was, and unnoticed
        with pytest.raises(ExportExistsError, match="symbolic link"):
            lightck.export_checkpoint(lightck.recover(pool), target, overwrite=overwrite)
    assert target.is_symlink()
    assert not elsewhere.exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "directory"])
def test_what_is_no_file_is_never_replaced(kind, pool, folder):
    """A rename over /dev/null succeeds for root, and breaks the system."""
    pool_with(pool)
    target = folder / "it"
    if kind == "device" and os.geteuid():
        pytest.skip("only root makes devices")
    makes: dict[str, Callable[[], Any]] = {
        "pipe": lambda: os.mkfifo(target),
        "device": lambda: os.mknod(target, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
        "socket": lambda: os.mknod(target, stat.S_IFSOCK | 0o600),
        "directory": target.mkdir,
    }
    makes[kind]()
    before = target.lstat()
    for overwrite in (False, True):
        with pytest.raises(ExportExistsError, match=f"not a regular file but a {kind}"):
            lightck.export_checkpoint(lightck.recover(pool), target, overwrite=overwrite)
    assert target.lstat() == before
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []


def test_name_that_is_too_long_is_an_export_error(pool, folder):
    pool_with(pool)
    for overwrite in (False, True):
        with pytest.raises(ExportError, match="could not be written: File name too long"):
            lightck.export_checkpoint(lightck.recover(pool), folder / ("n" * 300), overwrite=overwrite)


def test_a_path_is_no_checkpoint(pool, folder):
    pool_with(pool)
    with pytest.raises(TypeError, match=r"checkpoint is a str, not a lightck\.Checkpoint.*recover"):
        lightck.export_checkpoint(str(pool), folder / "it")  # type: ignore[arg-type]
    assert not (folder / "it").exists()


def test_path_that_cannot_be_a_file_s(pool, folder):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    before = sorted(folder.iterdir())
    with pytest.raises(TypeError, match="is bytes"):
        lightck.export_checkpoint(checkpoint, os.fsencode(folder / "it"))  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="NUL"):
        lightck.export_checkpoint(checkpoint, f"{folder}/it\0")
    assert sorted(folder.iterdir()) == before


def test_overwrite_is_true_or_false(pool, folder):
    pool_with(pool)
    (folder / "it").write_text("mine")
    with pytest.raises(TypeError, match="overwrite='no' is a str"):
        lightck.export_checkpoint(lightck.recover(pool), folder / "it", overwrite="no")  # type: ignore[arg-type]
    assert (folder / "it").read_text() == "mine"


def test_mode_is_what_the_umask_leaves(pool, folder):
    pool_with(pool)

    def modes() -> list[int]:
        found = []
        for umask in (0o022, 0o077):
            os.umask(umask)
            exported = lightck.export_checkpoint(lightck.recover(pool), folder / f"{umask:o}.safetensors")
            found.append(os.stat(exported.path).st_mode & 0o777)
        return found

    assert in_child(modes) == [0o644, 0o600]


@pytest.mark.parametrize("format", FORMATS)
def test_full_disk_is_a_typed_error_and_leaves_nothing(format, pool, folder):
    """RLIMIT_FSIZE: a write beyond it fails as one on a full disk does."""
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    (folder / "old").write_text("mine")

    def work() -> tuple[str, int | None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
        try:
            lightck.export_checkpoint(checkpoint, folder / "old", format=format, overwrite=True)
        except ExportError as err:
            return str(err), err.errno
        return "no error", None

    message, code = in_child(work)
    assert "could not be written" in message
    assert code == 27, "EFBIG"
    assert (folder / "old").read_text() == "mine"
    assert sorted(p.name for p in folder.iterdir()) == ["old", "run.pool", "run.pool.lock"]


def test_a_folder_that_cannot_be_synced_has_an_error_of_its_own(pool, folder, monkeypatch):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    (folder / "old").write_text("mine")
    sync = os.fsync

    def failing_for_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", failing_for_folders)
    with pytest.raises(
        ExportError, match="is complete, but the folder above it could not be synced: Input/output error"
    ):
        lightck.export_checkpoint(checkpoint, folder / "old", overwrite=True)
    assert same(safetensors.torch.load_file(folder / "old"), dict(checkpoint.model))
    monkeypatch.setattr(
        os, "fsync", lambda fd: sync(fd) if os.path.exists(f"/proc/self/fd/{fd}/.metadata") else failing_for_folders(fd)
    )
    with pytest.raises(ExportError, match=r"The folder .* is complete, but the folder above it could not be synced"):
        lightck.export_checkpoint(checkpoint, folder / "dcp", format="dcp")
    assert (folder / "dcp" / ".metadata").exists()


def test_a_pool_that_cannot_be_read_is_not_called_a_file_that_cannot_be_written(folder):
    """``PoolIOError`` is an ``OSError`` too."""
    failed = PoolIOError("The pool cannot be read.", errno.EIO)
    with pytest.raises(PoolIOError) as found, atomic_file(str(folder / "out"), overwrite=False):
        raise failed
    assert found.value is failed
    assert not list(folder.iterdir())


def test_kill_in_mid_export_leaves_no_file_under_the_name(pool, folder):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    path = folder / "model.safetensors"

    def work() -> None:
        seen: list[str] = []
        read = checkpoint.tensor

        def killing(name: str) -> torch.Tensor:
            seen.append(name)
            if len(seen) == 3:
                os.kill(os.getpid(), 9)
            return read(name)

        checkpoint.tensor = killing  # type: ignore[method-assign]
        lightck.export_checkpoint(checkpoint, path)

    killed_child(work)
    assert not path.exists()
    lightck.export_checkpoint(checkpoint, path)
    assert len(safetensors.torch.load_file(path)) == 4


@pytest.mark.parametrize(
    ("options", "message"), [({"format": "onnx"}, "'safetensors', 'torch'"), ({"what": "some"}, "'model', 'all'")]
)
def test_unknown_choices_are_refused(options, message, pool, folder):
    pool_with(pool)
    with pytest.raises(ValueError, match=message):
        lightck.export_checkpoint(lightck.recover(pool), folder / "file", **options)


def test_missing_folder_is_reported(pool, folder):
    pool_with(pool)
    with pytest.raises(ExportError, match="No such file"):
        lightck.export_checkpoint(lightck.recover(pool), folder / "nowhere" / "file")


def test_model_of_many_blocks(pool, folder):
    model = net(BIG)
    lightck.export_checkpoint(saved(model, pool), folder / "model.safetensors")
    assert same(safetensors.torch.load_file(folder / "model.safetensors"), weights(model))

"""Small imitations of published optimizers.

Each imitates how an optimizer keeps its state, not its numbers: one moment, factored moments, lists and nested
containers, bytes with a shared table, state under keys that are no parameters, state that appears late, wrappers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Closure = Any


class Simple(Optimizer):
    """``step`` as most third-party optimizers write it: by parameter, with an optional closure."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])
        return loss

    def update(self, p: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
        raise NotImplementedError


class Lion(Simple):
    """One moment, no counter."""

    def update(self, p, group, state):
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        direction = state["exp_avg"].mul(0.9).add(p.grad, alpha=0.1).sign_()
        p.add_(direction, alpha=-group["lr"])
        state["exp_avg"].mul_(0.99).add_(p.grad, alpha=0.01)


class Factored(Simple):
    """Adafactor as transformers has it: row and column vectors, an int counter, a float."""

    def update(self, p, group, state):
        if not state:
            state.update(step=0, RMS=0.0)
            if p.dim() >= 2:
                state["exp_avg_sq_row"] = torch.zeros(p.shape[:-1])
                state["exp_avg_sq_col"] = torch.zeros(p.shape[:-2] + p.shape[-1:])
            else:
                state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["RMS"] = float(p.norm() / p.numel() ** 0.5)
        beta, square = 1.0 - state["step"] ** -0.8, p.grad.square() + 1e-30
        if p.dim() >= 2:
            row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.mul_(beta).add_(square.mean(-1), alpha=1 - beta)
            col.mul_(beta).add_(square.mean(-2), alpha=1 - beta)
            scale = (row / row.mean()).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)
        else:
            scale = state["exp_avg_sq"].mul_(beta).add_(square, alpha=1 - beta).rsqrt()
        p.add_(p.grad * scale, alpha=-group["lr"] * max(1e-3, state["RMS"]))


class Soap(Simple):
    """Shampoo and SOAP: lists of matrices, None for unused dimensions, orthogonal bases recomputed now and then."""

    def update(self, p, group, state):
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["GG"] = [torch.zeros(n, n) if n <= 100 else None for n in p.shape]
            state["Q"], state["merged"] = None, (tuple(p.shape), True)
        state["step"] += 1
        for dim, matrix in enumerate(state["GG"]):
            if matrix is not None:
                flat = p.grad.movedim(dim, 0).reshape(len(matrix), -1)
                matrix.lerp_(flat @ flat.T, 0.1)
        if state["step"] % 2 == 1:
            state["Q"] = [torch.linalg.qr(m + torch.eye(len(m)))[0] if m is not None else [] for m in state["GG"]]
        state["exp_avg"].lerp_(p.grad, 0.2)
        direction = state["exp_avg"]
        for dim, q in enumerate(state["Q"]):
            if isinstance(q, Tensor):
                first = direction.movedim(dim, 0)
                direction = (q @ first.reshape(len(q), -1)).view(first.shape).movedim(0, dim)
        p.add_(direction, alpha=-group["lr"])


class Sophia(Simple):
    """A Hessian that is estimated at some steps only; the counter is a tensor."""

    def update(self, p, group, state):
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), hessian=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].mul_(0.96).add_(p.grad, alpha=0.04)
        if state["step"] % 2 == 1:
            state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        ratio = (state["exp_avg"].abs() / (state["hessian"] + 1e-15)).clamp(None, 1)
        p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class ScheduleFree(Simple):
    """Weights are y while training and x while evaluating; counters live in the groups, as int, float and tensor."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        counters = {"k": 0, "weight_sum": 0.0, "lr_max": torch.tensor(-1.0), "train_mode": False}
        super().__init__(params, lr, betas=(0.9, 0.99), **counters)

    @torch.no_grad()
    def _swap(self, train: bool) -> None:
        for group in self.param_groups:
            weight = 1 - 1 / group["betas"][0] if not train else 1 - group["betas"][0]
            for p in group["params"] if group["train_mode"] is not train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups), "call train() first"
        for group in self.param_groups:
            group["lr_max"] = torch.maximum(group["lr_max"], torch.tensor(group["lr"]))
            group["weight_sum"] += float(group["lr_max"]) ** 2
            weight = float(group["lr_max"]) ** 2 / group["weight_sum"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], weight).add_(p.grad, alpha=-group["lr"] * (1 - weight) * 0.1)
                state["z"].sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class EightBit(Simple):
    """bitsandbytes: moments as bytes in blocks with a scale each, and one table of values that all parameters share."""

    BLOCK = 64

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.name2qmap = {"dynamic": torch.linspace(-1, 1, 256)}

    def update(self, p, group, state):
        if not state:
            state["state1"] = torch.full(p.shape, 127, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(-(-p.numel() // self.BLOCK))
            state["qmap1"], state["step"] = self.name2qmap["dynamic"], 0
        state["step"] += 1
        moment = state["qmap1"][state["state1"].long()].flatten()
        pad = torch.nn.functional.pad(moment, (0, len(state["absmax1"]) * self.BLOCK - p.numel()))
        blocks = pad.view(-1, self.BLOCK) * state["absmax1"].unsqueeze(1)
        grads = torch.nn.functional.pad(p.grad.flatten(), (0, pad.numel() - p.numel())).view(-1, self.BLOCK)
        blocks = 0.9 * blocks + grads
        state["absmax1"].copy_(blocks.abs().amax(1))
        unit = (blocks / state["absmax1"].clamp(min=1e-12).unsqueeze(1)).flatten()[: p.numel()]
        state["state1"].copy_(((unit + 1) * 127.5).round().to(torch.uint8).view(p.shape))
        p.sub_(state["qmap1"][state["state1"].long()] * blocks.abs().mean(), alpha=group["lr"])


class Odd(Simple):
    """Everything that a state dict may hold besides tensors, and keys that are no plain strings."""

    def update(self, p, group, state):
        if not state:
            state.update(
                {
                    "nested": {"inner": [torch.zeros_like(p), {"deep": (torch.zeros(2), None)}], 3: "three"},
                    "none": None,
                    "flag": False,
                    "note": "begun",
                    "empty": [],
                    "a/b": torch.zeros_like(p),
                    7: torch.ones(3),
                    ("pair", 1): 1.5,
                    "history": OrderedDict(),
                    "scalar": torch.tensor(0, dtype=torch.int64),
                }
            )
        state["nested"]["inner"][0].add_(p.grad)
        state["nested"]["inner"][1]["deep"][0].add_(1)
        state["flag"] = not state["flag"]
        state["note"] += "."
        state["a/b"].lerp_(p.grad, 0.5)
        state[7].mul_(1.5)
        state["history"][len(state["history"])] = float(p.grad.sum())
        state["scalar"] += 1
        scale = (1.5 if state["flag"] else 0.5) * len(state["note"]) / float(state[7][0])
        p.add_(state["nested"]["inner"][0] + state["a/b"], alpha=-group["lr"] * scale)


class Global(Simple):
    """Counters and buffers of the whole optimizer: in ``state`` under strings and in a group."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, total=0)
        self.state["k"] = 0
        self.state["d"] = {"sum": torch.zeros(()), "seen": torch.zeros(2000)}

    def step(self, closure: Closure = None) -> Any:
        self.state["k"] += 1
        self.param_groups[0]["total"] += sum(p.numel() for g in self.param_groups for p in g["params"])
        self.state["d"]["seen"][self.state["k"]] += 1
        return super().step(closure)

    def update(self, p, group, state):
        self.state["d"]["sum"] += p.grad.square().sum()
        self.state["d"]["seen"].mul_(0.5).add_(p.grad.mean())
        rate = group["lr"] / (1 + float(self.state["d"]["sum"])) ** 0.5 + float(self.state["d"]["seen"].mean())
        p.add_(p.grad, alpha=-rate / self.state["k"])


class Late(Simple):
    """State that appears at the third step, and replaces other state."""

    def update(self, p, group, state):
        state["step"] = state.get("step", 0) + 1
        if state["step"] < 3:
            state.setdefault("warmup", torch.zeros_like(p)).add_(p.grad)
        elif state["step"] == 3:
            state["momentum"] = state.pop("warmup") / 2
        if "momentum" in state:
            state["momentum"].mul_(0.9).add_(p.grad)
            state.setdefault("second", torch.zeros_like(p)).addcmul_(p.grad, p.grad)
        p.add_(state.get("momentum", p.grad), alpha=-group["lr"])


class Wider(Simple):
    """Moments in another dtype than the parameter: float32 for bfloat16, bfloat16 for float32."""

    def update(self, p, group, state):
        other = torch.float32 if p.dtype == torch.bfloat16 else torch.bfloat16
        if not state:
            state.update(master=p.to(torch.float32).clone(), moment=torch.zeros_like(p, dtype=other))
        state["moment"].mul_(0.9).add_(p.grad.to(other))
        state["master"].sub_(state["moment"].float(), alpha=group["lr"])
        p.copy_(state["master"])


class NotADict(Simple):
    """``state[p]`` is a list."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                moment, count = self.state[p] if p in self.state else [torch.zeros_like(p), 0]
                self.state[p] = [moment.mul_(0.9).add_(p.grad), count + 1]
                p.sub_(moment, alpha=group["lr"] / (count + 1))


class Overriding(torch.optim.SGD):
    """A subclass of torch's whose ``step`` does something around ``super().step()``."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norm"] = p.grad.norm()
                p.grad.div_(self.state[p]["norm"] + 1e-6)
        loss = super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return loss


# -- wrappers --------------------------------------------------------------------------------------------------------


class Sam(Optimizer):
    """Sharpness-aware: ``step(closure)`` perturbs the weights, calls the closure, restores them and lets a base
    optimizer update."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"] / (float(norm) + 1e-12))

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


class Lookahead(Optimizer):
    """As widely copied: no ``super().__init__()``, slow weights in a ``state`` of its own, a counter in each group."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.k, self.alpha = k, alpha
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Closure = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self._update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
            self.state[p]["slow"].add_(p - self.state[p]["slow"], alpha=self.alpha)
            p.data.copy_(self.state[p]["slow"])


class NoOptimizer:
    """Lookahead without any base class: only its attributes show that it is an optimizer."""

    __init__, _update, step = Lookahead.__init__, Lookahead._update, Lookahead.step  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class InnerState(Lookahead):
    """As in timm: the slow weights lie in the state of the wrapped optimizer."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        super().__init__(optimizer, k, alpha)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.state = defaultdict(dict)

    def _update(self, group: dict[str, Any]) -> None:
        own, self.state = self.state, self.optimizer.state
        super()._update(group)
        self.state = own


class Both(Optimizer):
    """A container: Muon for matrices, AdamW for the rest; one ``step`` steps both."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor]) -> None:
        super().__init__([*matrices, *others], {})
        self.parts = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    def step(self, closure: Closure = None) -> None:
        for part in self.parts:
            part.step()


class Passing:
    """Forwards everything: no state, no hooks, no Optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Closure = None) -> Any:
        return self.optimizer.step(closure)


class Accelerated(Optimizer):
    """As Accelerate's: an Optimizer by class only, whose state and groups are those of the wrapped one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Closure = None) -> Any:
        return self.optimizer.step(closure)


class Lightning:
    """As Lightning's: takes over the attributes, hooks included, and the class of the wrapped optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__dict__.update(optimizer.__dict__)
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", (Lightning, type(optimizer)), {})

    def step(self, closure: Closure = None) -> Any:
        return self._optimizer.step(closure)

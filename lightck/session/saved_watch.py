"""Warns if nothing of a training is being saved, from the first training forward to ``close()``.

A checkpoint closes only after an update that lightck detects. In three kinds of loops no checkpoint ever closes, and no
error shows it: a loop without an optimizer object; a loop with a second optimizer that never steps, so that no update
is complete; and a loop whose model was built again, while the session follows the old model. The watch counts
iterations in which no checkpoint closed. Accumulated gradients, or a GradScaler that skips, may explain such
iterations. So the watch also compares parameters before it warns.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer

from lightck.hooks.boundary import Boundary
from lightck.session.capture import Capture
from lightck.session.state_marks import Marks, changed_names, tensor_marks

log = logging.getLogger("lightck")
_CHECK_AFTER = 100
"""The watch checks after this many training forwards, calls of ``end_step()`` or updates without a checkpoint: more
than any loop accumulates or skips in a row."""
_WARN_AFTER_EXPLICIT = 1000
"""A warning comes after this many updates without a checkpoint, if an earlier run called ``end_step()`` and this one
has not yet. It is more than ``_CHECK_AFTER``, because some loops call ``end_step()`` only once in an epoch."""
_FIRST = 8
"""If no optimizer is followed, the model's tensors are compared at each of the first ``_FIRST`` training forwards, or
at each of the first ``_FIRST // 2`` calls of ``end_step()``."""
_TWIN_WARNINGS_MAX = 3
"""``_check_twin`` warns at most this often: a loop may train two models of the same shapes in turns."""
_TWIN_STEPS = 10
"""``_check_twin`` warns when one optimizer of another model has made this many steps in a row. (It warns only about a
*twin*: a model whose parameters have the same shapes as those of the session's model.)"""
_TWIN_STEPS_IF_USED = 100
"""The same limit, if the session's model was called or updated since attach. It is larger, because copies of such a
model may be trained on purpose (the clients in federated learning), with fewer steps in a row than this."""
_FOREIGN_UPDATES = 4
"""If the followed optimizers have no parameter of the session's model, a warning comes unless the model's parameters
have changed after this many updates. (They change if the loop copies master weights into the model.)"""
_NO_OPTIMIZER = (
    "no optimizer is followed: none was found or passed that has a parameter of this model, so lightck does not know "
    "when an update is made"
)
_CURE = (
    "Build the optimizer over this model's parameters before attach, or pass it: attach(..., optimizer=opt). In a loop "
    "that updates by hand call session.end_step() after each update (the call then counts as the update), and pass in "
    "state= what the update keeps, such as momentum"
)


class SavedWatch:
    """The watch of one session. It gives one warning in all, apart from the warning about another model
    (``_check_twin``), which can come in addition, up to ``_TWIN_WARNINGS_MAX`` times. ``problem`` returns the message
    that ``close()`` raises."""

    def __init__(self, capture: Capture, boundary: Boundary, follow_live: Callable[[], bool]) -> None:
        """``follow_live``: searches live objects for an optimizer of this model, follows it, and returns whether there
        is such an optimizer."""
        self._capture, self._boundary, self._follow_live = capture, boundary, follow_live
        self._idle_forwards = 0  # training forwards since the last update
        self._end_steps = 0  # calls of end_step() in this session
        self._longest_interval = 0  # the largest number of updates between two calls of end_step()
        self._idle_end_steps = 0  # calls of end_step() since the last update
        self._was_used = False  # whether this model was called in training, or updated, since attach
        self._n_twin_warnings = 0
        self._n_steps_elsewhere = 0  # steps of all optimizers of other models
        self._other_optimizer: weakref.ref[Optimizer] | None = None
        """The optimizer of another model that stepped last."""
        self._n_other_steps = 0
        """Steps in a row of ``_other_optimizer``: those since another one stepped, or since this session's model was
        called or updated."""
        self._twin_class: str | None = None
        """Class name of ``_other_optimizer``, if it trains a twin (see ``_is_twin``), else None. Computed at the second
        of its steps in a row, and so never in a loop that updates the two models in turn."""
        self._is_twin_trained = False  # whether the warning of ``_check_twin`` was given
        self._params_at_second_step: Marks = {}
        """Marks of this model's parameters at the second step in a row of ``_other_optimizer``. Empty if
        ``_twin_class`` is None."""
        self._by_hand: tuple[weakref.ref[Optimizer] | None, int] = None, 0
        """With ``optimizer=[]``: the optimizer of this model that stepped last, and how often ``end_step()`` was called
        before this optimizer's first step."""
        self._before: Marks = {}  # marks of the parameters at an earlier iteration
        self._at_end_step: Marks = {}  # marks of the model's tensors at the last end_step()
        self._is_reported = False  # whether the warning was given
        self._was_searched = False  # whether live objects were searched for an optimizer that was made after attach
        self._foreign_updates = -1
        """Updates so far, if the followed optimizers have no parameter of this model. -1: updates are not counted,
        because the followed optimizers have parameters of this model, or because this model was called before the
        first update."""

    # -- what the session reports ------------------------------------------------------------------------

    def training_forward(self) -> None:
        """A training forward of the root module begins."""
        self._was_used = True
        self._n_other_steps = 0
        self._idle_forwards += 1
        if self._boundary.n_optimizers:
            self._idle_iterations(self._idle_forwards)
        elif not self._end_steps:
            self._forward_without_optimizer()

    def updated(self) -> None:
        """A followed optimizer made an update."""
        if not self._was_used and self._have_no_parameter_here():
            self._foreign_updates = 0
        self._was_used = True
        self._idle_forwards = self._idle_end_steps = self._n_other_steps = 0
        if 0 <= self._foreign_updates < _FOREIGN_UPDATES:
            self._compare_updates()

    def end_step(self) -> bool:
        """``end_step()`` was called. Returns whether the call counts as an update: it does if no optimizer is
        followed."""
        self._end_steps += 1
        if self._boundary.explicit:  # before the first call, other events may close checkpoints
            self._longest_interval = max(self._longest_interval, self._boundary.most_pending)
        self._idle_end_steps += 1
        if not self._boundary.n_optimizers and self._end_steps == 1:
            self._look_for_optimizer()
        if self._boundary.n_optimizers:
            self._idle_iterations(self._idle_end_steps)
            return False
        if self._end_steps == 1:
            log.info(
                "lightck: no optimizer is followed: each end_step() counts as an update, and waits for its checkpoint"
            )
        if self._end_steps <= _FIRST // 2:
            self._compare_end_steps()
        return True

    def before_step(self, index: int) -> None:
        """The optimizer ``index`` is about to make an update. To be called after the boundary, if this event is one."""
        n = self._boundary.pending(index)
        if n < _CHECK_AFTER or self._is_reported:
            return
        if self._boundary.explicit and n >= _WARN_AFTER_EXPLICIT and not self._end_steps:
            self._warn(
                f"{n} updates were made since the last checkpoint. The interrupted run called session.end_step(), and "
                "from then on only end_step() closes a step, also after a resume; this run has not called it, so "
                "nothing is saved. Call it as the last statement of the loop"
            )
        elif self._boundary.explicit and self._end_steps and n >= max(_CHECK_AFTER, 3 * self._longest_interval):
            self._warn(
                f"{n} updates were made since session.end_step() was last called, and none of them is saved. Once "
                "end_step() was called, only end_step(), flush() and close() close a step; next() on a session "
                "loader and the model's forward no longer do. Call end_step() as the last statement of every "
                "iteration; or never call it, and call session.flush() where you need a checkpoint"
            )
        elif not self._boundary.explicit and self._boundary.n_optimizers > 1:
            self._warn_incomplete_round(index, n)

    def step_elsewhere(self, optimizer: Optimizer) -> None:
        """An optimizer of another model makes a step. No open session follows this optimizer."""
        self._n_steps_elsewhere += 1
        if self._other_optimizer is None or self._other_optimizer() is not optimizer:
            self._other_optimizer, self._n_other_steps = weakref.ref(optimizer), 0
        self._n_other_steps += 1
        if self._n_other_steps == 2:
            self._twin_class = type(optimizer).__name__ if self._is_twin(optimizer) else None
            self._params_at_second_step = self._params() if self._twin_class is not None else {}
        if self._n_other_steps == (_TWIN_STEPS_IF_USED if self._was_used else _TWIN_STEPS):
            self._check_twin()

    def step_by_hand(self, optimizer: Optimizer) -> None:
        """An optimizer of this model steps although ``optimizer=[]`` was passed. Warn if it has state and has stepped
        both before and after an ``end_step()``. (An inner optimizer of Reptile or MAML does not live that long.)"""
        known, since = self._by_hand
        if known is None or known() is not optimizer:
            self._by_hand = weakref.ref(optimizer), self._end_steps
        elif self._end_steps > since and optimizer.state and not self._is_reported:
            self._warn(
                f"optimizer=[] was passed, and {type(optimizer).__name__} steps parameters of this model in several "
                "iterations. It is not followed, so its state is in no checkpoint. Pass it: attach(..., optimizer=opt)"
            )

    def session_ends(self) -> None:
        """Warn if the last updates that the session saw were updates of another model of the same shapes."""
        if self._was_used and self._boundary.n_optimizers:
            self._check_twin()

    def _check_twin(self) -> None:
        if self._n_other_steps < 2 or self._twin_class is None or self._end_steps:
            return
        if changed_names(self._params_at_second_step, self._params()):
            return  # the loop copies what the other model has learned into this one
        self._is_twin_trained = True
        if self._n_twin_warnings == _TWIN_WARNINGS_MAX:
            return
        self._n_twin_warnings += 1
        since = f"since update {self._boundary.step}" if self._was_used else "since attach"
        self._warn(
            f"{self._twin_class} made {self._n_other_steps} updates of another model, whose parameters "
            "have the same shapes as those of this session's model. This session's model was neither called nor "
            f"updated {since}. The updates of the other model are not saved. If the model was built again (a notebook "
            "cell that was run again), the session still saves the old one: close this session and attach to the new "
            "model"
        )

    def problem(self) -> str | None:
        """If nothing was saved although this model, or another one in its place, was trained: the message of the error
        that ``close()`` raises. Otherwise None."""
        if self._is_twin_trained and not self._was_used and not self._end_steps:
            return (
                "Nothing was saved: the model of this session was neither called nor updated since attach, while "
                "another model was trained, whose parameters have the same shapes. Attach to the model that is trained."
            )
        if self._boundary.n_optimizers or self._end_steps or self._idle_forwards < 2:
            return None
        changed = changed_names(self._before, self._params())
        if not (changed or self._has_gradients() or self._n_steps_elsewhere):
            return None  # the model was called but not trained
        fact = f" ({_some(changed)} changed)" if changed else ""
        forwards = f"{self._idle_forwards} training forwards ran{fact}"
        return f"Nothing was saved, although {forwards}: {_NO_OPTIMIZER}. {_CURE}."

    # -- no optimizer is followed ------------------------------------------------------------------------

    def _forward_without_optimizer(self) -> None:
        """Warn at the first sign of an update in the first ``_FIRST`` forwards, and otherwise after ``_CHECK_AFTER``
        forwards. Before the warning, search for an optimizer that was made after attach. If there is one, do not
        warn."""
        n = self._idle_forwards
        if n == 1:
            self._before = self._params()
        elif not self._is_reported and (n <= _FIRST or n == _CHECK_AFTER):
            changed = changed_names(self._before, self._params())
            is_due = n == _CHECK_AFTER or (not self._was_searched and (changed or self._n_steps_elsewhere > 1))
            if is_due and not self._look_for_optimizer():
                fact = f"{_some(changed)} changed" if changed else f"{n} training forwards ran"
                self._warn(f"{fact}, and {_NO_OPTIMIZER}. Nothing is saved, and close() will raise an error. {_CURE}")

    def _look_for_optimizer(self) -> bool:
        """Search for an optimizer that was made after attach. Returns whether there is one, followed or not. Only the
        first call searches; every later call returns False."""
        if self._was_searched:
            return False
        self._was_searched = True
        return self._follow_live()

    def _compare_end_steps(self) -> None:
        """Warn if the model did not change between two calls of ``end_step()`` although it has gradients. The gradients
        are probably accumulated, and a checkpoint does not hold them."""
        now = tensor_marks(self._capture.model.tensors(None))
        is_same = (
            bool(self._at_end_step)
            and self._at_end_step.keys() == now.keys()
            and not changed_names(self._at_end_step, now)
        )
        self._at_end_step = now if self._end_steps < _FIRST // 2 else {}
        if is_same and not self._is_reported and self._has_gradients():
            self._warn(
                "end_step() was called although no parameter had changed since the previous call. No optimizer is "
                "followed, so each end_step() counts as an update. If the loop accumulates gradients over several "
                "batches, a resume loses them, because a checkpoint holds no gradients. Call end_step() only after an "
                "update"
            )

    # -- an optimizer is followed ------------------------------------------------------------------------

    def _idle_iterations(self, n: int) -> None:
        """Check after ``n`` iterations without an update. If no parameter changes between the last two, the loop
        accumulates gradients, and nothing is wrong."""
        if n == _CHECK_AFTER:
            self._before = self._params()
        elif n == _CHECK_AFTER + 1 and not self._is_reported:
            changed = changed_names(self._before, self._params())
            if changed:
                classes = ", ".join(view.class_name for view in self._capture.optimizers)
                self._warn(
                    f"{_CHECK_AFTER} iterations passed without a step of {classes}, and {_some(changed)} changed "
                    "between the last two. An update that lightck does not see closes no step, so nothing is saved. "
                    f"Call step() of {classes}, or, where the loop updates by hand, attach(..., optimizer=[]) and call "
                    "session.end_step() after each update"
                )

    def _warn_incomplete_round(self, index: int, n: int) -> None:
        """Warn that other optimizers made no update while the optimizer ``index`` made ``n``."""
        # The roots are the optimizers whose steps count as updates.
        roots = sorted({view.root for view in self._capture.optimizers if not view.wraps})
        names = [self._named(root) for root in roots if not self._boundary.pending(root)]
        self._warn(
            f"Since the last step closed, {self._named(index)} made {n} updates, and {' and '.join(names)} made none. "
            "With several optimizers a step closes when each of them has made an update, so nothing is saved "
            "meanwhile. Pass only the optimizers that make updates in this loop: attach(..., optimizer=[...]), or call "
            "session.end_step() as the last statement of the loop"
        )

    def _named(self, root: int) -> str:
        """Name the optimizer with this number for a message, with its class and its parameters."""
        views = [view for view in self._capture.optimizers if view.root == root and not view.wraps]
        names = [name for view in views for name, _ in view.params]
        number = len({view.root for view in self._capture.optimizers if view.root < root}) + 1
        return f"optimizer {number} ({views[0].class_name} of {_some(names)})" if views else f"optimizer {number}"

    def _have_no_parameter_here(self) -> bool:
        """Whether the followed optimizers have no parameter of this model. (Perhaps they update master weights, which
        the loop copies into the model.)"""
        params = [name for view in self._capture.optimizers for name, _ in view.params]
        return bool(params) and all(name.startswith("outside/") for name in params)

    def _compare_updates(self) -> None:
        """Warn if no parameter of this model changed between the first and the ``_FOREIGN_UPDATES``-th update by
        optimizers that have no parameter of this model."""
        self._foreign_updates += 1
        if self._foreign_updates == 1:
            self._before = self._params()
        elif (
            self._foreign_updates == _FOREIGN_UPDATES
            and not self._is_reported
            # If all parameters are frozen, the optimizer trains something else on purpose.
            and any(p.requires_grad for p in self._capture.model.model.parameters())
            and not changed_names(self._before, self._params())
        ):
            classes = ", ".join(view.class_name for view in self._capture.optimizers)
            self._warn(
                f"{classes} made {_FOREIGN_UPDATES} updates but has no parameter of this model, and no parameter of "
                "this model changed meanwhile. The optimizer was built over another model, or over parameters that "
                "were replaced since, so what it trains is not saved. Build it over model.parameters() of the attached "
                "model"
            )

    # -- inside ------------------------------------------------------------------------------------------

    def _params(self) -> Marks:
        return tensor_marks(live for live in self._capture.model.tensors(None) if live.role == "param")

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._capture.model.model.parameters())

    def _is_twin(self, optimizer: Optimizer) -> bool:
        """Whether the parameters of ``optimizer`` have the same shapes as those of this session's model, or as those of
        the followed optimizers. If so, ``optimizer`` probably trains the same model, built again."""
        theirs = _shapes(p for group in optimizer.param_groups for p in group["params"])
        ours = _shapes(p for p in self._capture.model.model.parameters() if p.requires_grad)
        followed = _shapes(p for view in self._capture.optimizers if not view.wraps for _, p in view.params)
        return bool(theirs) and theirs in (ours, followed)

    def _warn(self, fact: str) -> None:
        self._is_reported = True
        log.warning("lightck: %s", fact)


def _shapes(params: Iterable[torch.Tensor]) -> Counter[torch.Size]:
    return Counter(p.shape for p in params)


def _some(names: list[str]) -> str:
    """The first name, and how many more there are, for a message."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}" if names else "nothing"

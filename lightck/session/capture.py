"""The state of a training at a boundary: which tensors a checkpoint holds, and its small state as bytes.

``Capture`` reads state at two moments. In the post-step hook it reads buffers, random states, loaders and the extra
state of modules provisionally, because the next step may change them before the checkpoint closes. (The checkpoint
closes at the pre-step hook of the next update at the latest.) At the boundary it reads all other small state. Large
tensors are only listed here: the pipeline copies them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from lightck.dataloader.mid_batch import MidBatch
from lightck.dataloader.persistent import PersistentLoaders
from lightck.dataloader.positions import Positions
from lightck.errors import SessionError, UnsupportedError
from lightck.events import ClosingEvent
from lightck.layout import Layout
from lightck.pool.format.saved_by import CLAIM_KEY, RUN_ID_KEY
from lightck.restore.contents import NOT_EXACT_KEY, RowsOfOther
from lightck.restore.saved_layout import saved_layout
from lightck.session.discover import Objects, numbered_name
from lightck.session.provisional import Provisional, copy_tensors
from lightck.session.shared_state import warn_of_shared_memory_in_optimizers
from lightck.session.whole_units import WholeUnits
from lightck.state import rng, values
from lightck.state.buffers import BufferCopies
from lightck.state.build_record import CurrentBuild
from lightck.state.device_transfers import Devices
from lightck.state.fingerprint import fingerprint
from lightck.state.inventory import (
    Live,
    ModelView,
    OptimizerView,
    optimizer_views,
)
from lightck.state.local_tensors import refuse_optimizer_before_dtensors
from lightck.state.numbers import ModuleNumbers
from lightck.state.options_watch import OptionsWatch
from lightck.state.rng import ForkRngWatch
from lightck.state.rules import assign_parts
from lightck.state.shares import Shares
from lightck.state.signatures import ClosedStep, TensorList, UpdateRecord, tensor_list_of
from lightck.state.small_state import CachedPacker, Packed, StatePacker, join_list
from lightck.state.stand_ins import NO_STAND_INS, StandIns
from lightck.state.storable import class_name_of, is_loader
from lightck.state.update_record import BASE_EVERY_KEY, UPDATE_KEY

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")
_NO_VALUES = values.pack({}, path="")
ReadRows: TypeAlias = Callable[[Sequence[Live], "TensorList | None", int], list[RowsOfOther]]
"""Reads rows that other ranks write, and returns what the checkpoint records of them. Arguments: all tensors; their
``TensorList``, if there is one; the step."""


class _PackedOptimizer:
    """The small state of one optimizer, as it was packed for the last checkpoint."""

    def __init__(self) -> None:
        self.packed = b""
        self.options = OptionsWatch()
        self.tensor_list: TensorList | None = None
        """The tensor list for which ``packed`` was made. If ``Capture`` still has this list and no option has changed,
        ``packed`` is up to date. None: ``packed`` must be made again in any case, for example because the optimizer has
        state that is no tensor, or wraps another optimizer."""
        self.groups = CachedPacker()
        self.packer = StatePacker(never_mutated=("names",))


class Capture:
    """Refers, by name, to everything that a session saves, and reads it."""

    layout: Layout | None
    """Which parts of tensors the model holds, apart from DTensors, and their names in the whole model."""
    _layout_value: tuple[TensorList | None, dict[str, object]] | None = None
    """A cache: a tensor list, and the sharding layout as the small state holds it for this list."""

    update_of: Callable[[int, bool], UpdateRecord | None] | None = None
    """Returns what the update of a step consumed; None: checkpoints do not store it. Arguments: the step, and whether a
    checkpoint of it is saved."""
    run_id: str | None = None
    """The same in all checkpoints of a training, over its restarts and relayouts; None in a group of ranks, whose pools
    have it in their layout tables."""
    claim: str = ""
    """The newest claim of tiers that the training has made; empty if it never had tiers."""
    stand_ins: StandIns = NO_STAND_INS
    """Makes what is copied in place of tensors."""
    base_every: Callable[[], int | None] | None = None
    """Returns n, if each unit is written to a home once in n steps; None: each checkpoint holds the whole state."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Objects,
        layout: Layout | None = None,
    ) -> None:
        self.layout, self.model = layout, ModelView(model, layout)
        self.devices = Devices()
        self.objects = dict(objects)
        self.loaders: list[SessionLoader] = []
        self.positions = Positions(self.loaders)
        self.persistent = PersistentLoaders(self.loaders, self.objects)
        self.is_done = False
        """Whether the next checkpoint says that the training is finished."""
        self.mid_batch = MidBatch(self.loaders)
        self.provisional: Provisional | None = None
        """What was read after the last update; None if no checkpoint needs it."""
        self._buffer_copies = BufferCopies()
        self.resizable: set[str] = set()
        """Names of the buffers that a restore is allowed to resize: those that changed in size or dtype, were removed,
        or were None at first."""
        self.shares = Shares()
        self._tensor_list: TensorList | None = None
        """The tensors of the last boundary; None if a tensor was added or removed since."""
        self._compared_list: TensorList | None = None
        """The tensor list whose buffers were last compared with ``_built_buffers``."""
        self._built_buffers: dict[str, tuple[torch.Size, torch.dtype] | None] = {}
        """Name -> size and dtype that each buffer had when the model was built (None: the buffer was None then). A
        buffer that was added later has the size and dtype with which it was first seen."""
        self.expected_state_nbytes = 0
        """Bytes of the packed small state at the last call of ``expected_tensors``."""
        self.optimizers: list[OptimizerView] = []
        self.built = CurrentBuild(self.model, (), self.objects)
        self.numbers = ModuleNumbers(model)
        self._state, self._update_state = StatePacker(), StatePacker()
        self._packed_optimizers: defaultdict[int, _PackedOptimizer] = defaultdict(_PackedOptimizer)
        """Index of a view -> the small state of its optimizer at the last checkpoint."""
        self._object_states: defaultdict[str, CachedPacker] = defaultdict(CachedPacker)
        self._n_followed = 0
        """How many optimizers are followed, wrappers included."""
        self._is_unsharded_reported = self._is_shared_checked = False
        """Whether ``_warn_unsharded`` has warned; whether shared memory was checked, once optimizer state existed."""
        self._fork_rng_watch = ForkRngWatch()
        self._whole_units = WholeUnits()
        self._stepped_outside: set[int] = set()
        """Numbers (``OptimizerView.root``) of the wrappers whose inner optimizer was stepped outside of their own
        ``step``."""
        self._frozen: dict[int, int] = {}
        """The tensors that were frozen when ``tensors`` found them: id of ``Live.registered`` -> id of ``Live.tensor``.
        The two ids differ only for a DTensor."""
        self._updated_frozen, self._frozen_left = set[int](), dict[int, int]()
        """``_updated_frozen``: the ids (``Live.tensor``) of the frozen tensors that an optimizer updated since the last
        call of ``take_updated_frozen``. ``_frozen_left``: the rest of ``_frozen``."""
        self._never_had_grad: dict[int, dict[int, torch.Tensor]] = {}
        """View index -> (id -> parameter) for each parameter of the view that has had no gradient at any update, so
        that no update has changed the parameter."""
        self._seen_grad: frozenset[int] = frozenset()
        """Ids of parameters that had a gradient at an update."""
        self.add_optimizers(optimizers)

    def add_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Save these optimizers in addition to the present ones."""
        views = optimizer_views(
            optimizers, self.model.names_by_id(), n_views=len(self.optimizers), n_followed=self._n_followed
        )
        refuse_optimizer_before_dtensors(
            self.model.parameters(), [(v.class_name, v.params) for v in (*self.optimizers, *views)]
        )
        self._n_followed += len(optimizers)
        self._tensor_list = None
        self.optimizers.extend(views)
        self.built.add(views)
        self._never_had_grad |= {view.index: self._skipped_without_gradient(view) for view in views}

    def _skipped_without_gradient(self, view: OptimizerView) -> dict[int, torch.Tensor]:
        """The parameters that this optimizer leaves unchanged while they have no gradient: id -> parameter. Only a
        class of torch.optim outside of wrappers is known to leave such parameters unchanged; for others the dict is
        empty."""
        if view.wraps or view.is_wrapped or not type(view.optimizer).__module__.startswith("torch.optim."):
            return {}
        return {id(p): p for _, p in view.params}

    def use_shares(self, shares: Shares) -> None:
        """Write these shares from now on."""
        self.shares, self._tensor_list = shares, None

    def remember_built_buffers(self) -> None:
        """Record the buffers that the model was built with: a buffer that differs later is resizable."""
        self._built_buffers = {live.name: _shape_and_dtype(live.tensor) for live in self.model.buffers()}
        self._built_buffers |= {name: None for name, _, _ in self.model.vacant_buffers()}

    def forget(self) -> None:
        """Drop all references, because a closed session must keep no model, optimizer or worker alive."""
        self.model, self.numbers = ModelView(nn.Module()), ModuleNumbers(nn.Module())
        self.provisional = self._tensor_list = self._compared_list = self._layout_value = None
        self.stand_ins = NO_STAND_INS
        self._buffer_copies = BufferCopies()
        for held in (self.objects, self.loaders, self.optimizers, self._never_had_grad, self._packed_optimizers):
            held.clear()

    def refresh(self) -> None:
        """Name tensors again if modules or parameter groups have changed. The optimizers' tensors have the names of the
        parameters, which also change if a module is wrapped, pruned or parametrized."""
        are_renamed = self.model.refresh()
        if are_renamed:
            self._tensor_list = None
        if are_renamed or any(view.has_changed() for view in self.optimizers):
            self._tensor_list = None
            names = self.model.names_by_id()
            for view in self.optimizers:
                view.refresh(names)
                self._never_had_grad[view.index] |= {
                    k: p for k, p in self._skipped_without_gradient(view).items() if k not in self._seen_grad
                }

    # -- at the update -----------------------------------------------------------------------------------

    def before_first_update(self) -> None:
        """Find the devices again, because the model may have been moved to a device after attach."""
        self.devices.set_tensors(live.tensor for live in self.tensors())

    def note_gradients(self, index: int) -> None:
        """Record which parameters have a gradient now, and so can be changed by this update: torch's optimizers skip
        parameters without a gradient. ``index``: the number of the followed optimizer that makes the update."""
        for view in self.optimizers:
            if view.root != index:
                continue
            never_had_grad = self._never_had_grad[view.index]
            if never_had_grad:
                self._remove_with_grad(never_had_grad)
            if self._frozen_left:
                frozen = self._frozen_left
                for key in {id(p) for _, p in view.params if id(p) in frozen and p.grad is not None}:
                    self._updated_frozen.add(frozen.pop(key))

    def take_updated_frozen(self) -> set[int]:
        """Return the ids of tensors that count as frozen, but were updated by an optimizer since the last call. That
        happens if ``requires_grad`` was set to True for the update only, or if the loop assigned a gradient to them.
        Version counters do not show all such updates: a fused kernel moves none."""
        found = self._updated_frozen
        if found:
            self._updated_frozen, self._frozen_left = set(), dict(self._frozen)
        return found

    def _remove_with_grad(self, never_had_grad: dict[int, torch.Tensor]) -> None:
        """Remove from ``never_had_grad`` the parameters that have a gradient now, because the update may change
        them."""
        with_grad = [key for key, p in never_had_grad.items() if p.grad is not None]
        for key in with_grad:
            del never_had_grad[key]
        if with_grad:
            self._tensor_list = None
            self._seen_grad = self._seen_grad | frozenset(with_grad)

    def stepped_outside_wrapper(self, index: int) -> None:
        """An optimizer inside the wrapper ``index`` is stepped outside the wrapper's ``step``: by another method of the
        wrapper, or by the loop."""
        if index not in self._stepped_outside:
            self._stepped_outside.add(index)
            classes = " around ".join(view.class_name for view in self.optimizers if view.root == index)
            log.info(
                "lightck: %s: the inner optimizer is stepped outside the step() of its wrapper, where lightck cannot "
                "wait for a copy to end before the tensors change. So the tensors of the wrapper and of the inner "
                "optimizer are copied when a step closes, before training goes on",
                classes,
            )

    def after_update(self, *, is_needed: bool) -> None:
        """Read provisionally the state that the next forward or ``next()`` changes. ``is_needed``: False if the
        checkpoint of this update will not be saved, or is certain to close before that forward or ``next()``. Then
        nothing is read."""
        self.devices.add_update_streams()
        self._warn_unsharded()
        if not is_needed:
            self.provisional = None
            return
        self._fork_rng_watch.updated()
        self.provisional = provisional = Provisional(rng.capture())
        for name, obj in self.objects.items():
            if is_loader(obj):
                provisional.loader_states[name] = self._object_bytes(name, obj, provisional.large)
        copy_tensors(provisional.large)
        self._read_modules(provisional)

    def before_forward_of_next_step(self) -> None:
        """The forward of the next step begins, and its pre-step hook will close the checkpoint of the last update. Read
        buffers and extra state again, because what the loop has written to them since belongs to that checkpoint."""
        if self.provisional is not None and not self.provisional.has_next_begun:
            self.provisional.has_next_begun = True
            self.provisional.extra_large.clear()
            self._read_modules(self.provisional)

    def _read_modules(self, provisional: Provisional) -> None:
        self.refresh()
        if self.model.has_buffers:
            provisional.buffers = self._buffer_copies.take(self.model)
        provisional.extra = self._pack_extra_state(provisional.extra_large)
        copy_tensors(provisional.extra_large)

    def _warn_unsharded(self) -> None:
        """Warn once if a module of ``fully_shard`` was unsharded during the update. Its next forward then computes with
        the plain parameters that it holds, whose values are those from before the update."""
        if (
            not self._is_unsharded_reported
            and self.model.is_sharded
            and (name := self.model.unsharded_parameter()) is not None
        ):
            self._is_unsharded_reported = True
            log.warning(
                "lightck: the model was unsharded while its optimizer updated it (for example the parameter %r). Until "
                "it is resharded, it computes with the values from before the update. A checkpoint holds the new "
                "values, so a resumed run computes with these, and is not bit-identical. Call model.reshard() before "
                "optimizer.step(), for example after an evaluation between backward() and step()",
                name,
            )

    # -- at the boundary ---------------------------------------------------------------------------------

    def close(
        self,
        event: ClosingEvent,
        step: int,
        iteration: int,
        *,
        explicit: bool,
        copied_at_boundary: set[str],
        stale_after: Callable[[], int | None] = lambda: None,
        read_rows: ReadRows | None = None,
    ) -> ClosedStep:
        """Read the state for the checkpoint that this event closes. ``explicit``: whether ``end_step()`` was called.
        ``copied_at_boundary``: names of tensors that no background copy may read; they are recorded in the small state.
        ``stale_after``: returns a generation. Checkpoints between this generation and the new checkpoint are stale
        (None: none is stale). It is called after ``update_of``, which may find stale checkpoints. ``read_rows``: see
        ``ReadRows``."""
        self.refresh()
        # At a pre-step hook or a forward the next step has begun: it has fetched its batch and drawn random numbers.
        provisional = self._provisional_of(step) if event in (ClosingEvent.PRE_STEP, ClosingEvent.FORWARD) else None
        # At a pre-step hook the next step has already run its forward, which has changed the buffers.
        buffers_from = provisional if event is ClosingEvent.PRE_STEP else None
        update = None if self.update_of is None else self.update_of(step, True)
        self.stand_ins.prepare(step)
        lives, tensor_list = self.tensors(), self._tensor_list
        if tensor_list is None or tensor_list is not self._compared_list or event is ClosingEvent.PRE_STEP:
            self._compared_list = tensor_list
            self._find_resizable(None if buffers_from is None else buffers_from.copies_of(self.model.buffers()))
            self._refuse_resized_dtensors(lives)
        followed = (view.optimizer for view in self.optimizers)
        self._is_shared_checked = self._is_shared_checked or warn_of_shared_memory_in_optimizers(lives, followed)
        rows = [] if read_rows is None else read_rows(lives, tensor_list, step)
        small = self._small_state(event, explicit, copied_at_boundary, provisional, lives, stale_after(), rows, update)
        lives += [] if update is None else update.gradients
        if buffers_from is not None and (buffers_from.buffers or self.model.has_buffers):
            lives, tensor_list = self._with_buffers_of(buffers_from, lives), None
        return ClosedStep(step, iteration, lives, small, self._written_outside_step(lives), tensor_list, update)

    def close_update(self, step: int, iteration: int) -> ClosedStep:
        """For a step that is not saved as a checkpoint: read what its update consumed, and no other small state."""
        assert self.update_of is not None, "the strategy stores updates"
        self.refresh()
        update, lives = self.update_of(step, False), self.tensors()
        state, outside = b"", self._written_outside_step(lives)
        if update is not None:
            state = self._update_state.pack({"version": values.STATE_VERSION, UPDATE_KEY: update.value})
            lives += update.gradients
        return ClosedStep(step, iteration, lives, state, outside, self._tensor_list, update, is_checkpoint=False)

    def _provisional_of(self, step: int) -> Provisional:
        """What was read when the update of this step ended. Raises ``SessionError`` if nothing was read."""
        if self.provisional is None:
            raise SessionError(
                f"Step {step} cannot be saved: its random states were not read when its update ended, and the next "
                "step has begun. This is an error in lightck: please report it. Earlier checkpoints are intact."
            )
        return self.provisional

    def _written_outside_step(self, lives: list[Live]) -> frozenset[str]:
        """The names of tensors that a wrapper may write in other methods than ``step``: the parameters of its
        optimizers, and the state tensors of all optimizers. (In its ascent step, SAM writes the parameters and its own
        backup of them.) Before these methods there is no gate, so no background copy may read these tensors."""
        if not self._stepped_outside:
            return frozenset()
        params = {id(p) for view in self.optimizers if view.root in self._stepped_outside for _, p in view.params}
        return frozenset(live.name for live in lives if live.role == "optimizer" or id(live.registered) in params)

    def _find_resizable(self, buffers: Mapping[str, torch.Tensor] | None) -> None:
        """Add to ``resizable`` the buffers that have another size or dtype than in ``_built_buffers``, and the buffers
        that were removed. ``buffers``: name -> buffer, as read right after the update, to compare in place of the
        present buffers (None: compare the present ones)."""
        now = {live.name: live.tensor for live in self.model.buffers()} if buffers is None else buffers
        for name, tensor in now.items():
            if self._built_buffers.setdefault(name, _shape_and_dtype(tensor)) != _shape_and_dtype(tensor):
                self.resizable.add(name)
        if len(now) < len(self._built_buffers):
            self.resizable |= {
                name for name, built in self._built_buffers.items() if built is not None and name not in now
            }

    def _refuse_resized_dtensors(self, lives: list[Live]) -> None:
        """Refuse parts of tensors among the resizable buffers, because a restore could only make whole tensors."""
        for live in lives if self.resizable else ():
            if (live.dtensor is not None or live.part is not None) and live.name in self.resizable:
                kind = "DTensor" if live.part is None else "part of a tensor"
                raise UnsupportedError(
                    f"The buffer {live.name!r} is a {kind} that was added or resized after the model was built. A "
                    "restore could not make it again. Give the model this buffer, in its final size, when it is built."
                )

    @staticmethod
    def _with_buffers_of(provisional: Provisional, lives: list[Live]) -> list[Live]:
        """Return ``lives``, in which the present buffers are replaced by those that were read right after the update.
        The two may differ in shape."""
        own = [live for live in lives if live.role == "buffer" and live.alias is None]
        copies, parts = provisional.copies_of(own), {live.name: live.part for live in own}
        buffers = [Live(name, "buffer", t, None, None, part=parts[name]) for name, t in copies.items()]
        return [live for live in lives if live.role != "buffer" or live.alias is not None] + buffers

    def tensors(self) -> list[Live]:
        """The present tensors of model and optimizers."""
        tensor_list = self._tensor_list
        if tensor_list is not None and tensor_list.is_unchanged() and self.stand_ins.are_assigned:
            return list(tensor_list.lives)
        names = self.model.names_by_id()
        for view in self.optimizers:
            view.rename(names)
        trained = {
            id(p) for view in self.optimizers for _, p in view.params if id(p) not in self._never_had_grad[view.index]
        }
        # If no optimizer is followed, every parameter may change in an update.
        lives = self.model.tensors(trained if self.optimizers else None)
        for view in self.optimizers:
            lives.extend(view.outside())
            lives.extend(view.state_tensors())
        assign_parts(self.layout, lives)
        self.shares.assign(lives)
        self.stand_ins.assign(lives)
        self.devices.set_tensors(live.tensor for live in lives)
        self._tensor_list = tensor_list_of(lives, self.model.vacant(), self.optimizers)
        self._frozen = {id(live.registered): id(live.tensor) for live in lives if live.is_frozen}
        self._frozen_left = dict(self._frozen)
        return list(lives)

    def whole_units(self) -> frozenset[str]:
        """Return the names of the parameters whose units lie whole in each checkpoint of ``Gradients``."""
        return self._whole_units.of(self.tensors(), self.token, self.optimizers)

    @property
    def token(self) -> object:
        """An object that stays the same as long as ``tensors`` returns the same tensors, in the same memory; None if
        this is not known."""
        return None if self._tensor_list is None else self._tensor_list.token

    def state_is_only_tensors(self) -> bool:
        """Whether all state of the optimizers is tensors, as far as the last call of ``tensors`` found out."""
        tensor_list = self._tensor_list
        return tensor_list is not None and not any(tensor_list.with_values.values())

    def expected_tensors(self) -> Iterator[Live]:
        """Yield what ``tensors`` returns, and then the large tensors inside ``state=``, for the table of tensors in a
        pool. The generator also sets ``expected_state_nbytes``."""
        yield from self.tensors()
        large: list[Live] = []
        # The state_dict() of a loader is not called before its first pass, because some loaders draw random numbers in
        # it.
        unread = Provisional(rng.capture(), loader_states={n: b"" for n, o in self.objects.items() if is_loader(o)})
        self.expected_state_nbytes = len(self._small_state(ClosingEvent.FLUSH, False, set(), unread, large))
        yield from large

    def _small_state(
        self,
        event: ClosingEvent,
        explicit: bool,
        copied_at_boundary: set[str],
        provisional: Provisional | None,
        lives: list[Live],
        stale_after: int | None = None,
        rows_of_others: Sequence[RowsOfOther] = (),
        update: UpdateRecord | None = None,
    ) -> bytes:
        """Return the small state, packed, and append its large tensors to ``lives``. ``provisional``: what was read
        right after the update, to use in place of the present random states, states of loaders and extra state (None:
        the next step has not begun, so the present state is right). ``rows_of_others``: what ``ReadRows`` returned."""
        now = rng.capture()
        at_start = now if provisional is None else provisional.rng  # the random states from which the next step starts
        if provisional is not None:
            self._fork_rng_watch.warn_if_in_fork_rng()
        state: dict[str, object] = {
            "version": values.STATE_VERSION,
            "event": event.value,
            "explicit": explicit,
            "rng": Packed(at_start.packed()),
            "rng_forward": Packed(now.packed()) if event is ClosingEvent.FORWARD else None,
            "optimizers": Packed(join_list([self._packed_optimizer(view, lives) for view in self.optimizers])),
            "state": self._objects_value(provisional, lives),
            "classes": {name: class_name_of(obj) for name, obj in self.objects.items()},
            "extra": self._extra_state(event, provisional, lives),
            "loaders": self.positions.values(),
            "persistent_started": self.persistent.have_started_now(),
            "done": self.is_done,
            # Keys of the format: "at_once" has ``copied_at_boundary``, "elastic" has ``resizable``.
            "at_once": sorted(copied_at_boundary),
            "elastic": sorted(self.resizable),
            "stale_after": stale_after,
            "built": self.built.packed,
            "numbers": self.numbers.values_at_checkpoint(),
            # The format's key. In it, "frozen" means requires_grad=False, and not what it means in ``Live.is_frozen``.
            "frozen": self.built.without_grad_if_changed(self._tensor_list, self.model),
            "fingerprint": fingerprint(),
        }
        if self.run_id is not None:
            state[RUN_ID_KEY] = self.run_id
        if self.claim:
            state[CLAIM_KEY] = self.claim
        if self.layout is not None:
            state["layout"] = self._saved_layout(lives)
        if update is not None:
            state[UPDATE_KEY] = update.value
        if self.stand_ins.inexact_reason:
            state[NOT_EXACT_KEY] = self.stand_ins.inexact_reason
        if self.base_every is not None:
            state[BASE_EVERY_KEY] = self.base_every()
        if self.shares.cuts:
            state["others"] = [list(one) for one in rows_of_others]
        return self._state.pack(state)

    def _saved_layout(self, lives: Sequence[Live]) -> dict[str, object]:
        """Return what the small state holds of the layout."""
        assert self.layout is not None, "the caller has checked it"
        if self._layout_value is None or self._layout_value[0] is not self._tensor_list or self._tensor_list is None:
            names = [live.name.removeprefix("model/") for live in lives if live.name.startswith("model/")]
            self._layout_value = self._tensor_list, saved_layout(self.layout, names).to_value()
        return self._layout_value[1]

    def _packed_optimizer(self, view: OptimizerView, lives: list[Live]) -> bytes:
        """Return the small state of one optimizer, packed, and append its large tensors to ``lives``."""
        known, tensor_list = self._packed_optimizers[view.index], self._tensor_list
        may_differ = known.options.may_have_changed(view.optimizer.param_groups)
        if not may_differ and known.tensor_list is tensor_list is not None:
            return known.packed
        known.tensor_list = None  # set again below. If an error is raised before, ``packed`` is out of date
        view.refuse_nameless()
        path = numbered_name("optimizer", view.index, len(self.optimizers))
        # The parameters whose state is not only tensors. None: not known, so the state of all parameters is read.
        with_values = None if tensor_list is None else tensor_list.with_values[view.index]
        state, rest, large = view.state_values(with_values), view.other_state(), _collector(lives, "optimizer")
        known.packed = known.packer.pack(
            {
                "class": view.class_name,
                "wraps": view.wraps,
                "names": view.names,
                "groups": known.groups.pack(view.groups(), path=f"{path}/param_groups"),
                "values": values.pack(state, path=f"in {path}", large=large) if state else _NO_VALUES,
                "rest": values.pack(rest, path=f"in {path}/rest", large=large) if rest else _NO_VALUES,
            }
        )
        known.tensor_list = None if state or rest or view.wraps else tensor_list
        return known.packed

    def _objects_value(self, provisional: Provisional | None, lives: list[Live]) -> dict[str, bytes]:
        """Return name -> packed state of each object in ``state=``, and append their large tensors to ``lives``. The
        state of a loader is taken from ``provisional``, if given."""
        known: Mapping[str, bytes] = {}
        if provisional is not None:
            lives.extend(provisional.large)
            known = provisional.loader_states
        return {
            name: known[name] if name in known else self._object_bytes(name, obj, lives)
            for name, obj in self.objects.items()
        }

    def _object_bytes(self, name: str, obj: Any, lives: list[Live]) -> bytes:
        packer = self._object_states[name]
        return packer.pack(obj.state_dict(), path=f"state/{name}", large=_collector(lives, "state"))

    def _extra_state(self, event: ClosingEvent, provisional: Provisional | None, lives: list[Live]) -> dict[str, bytes]:
        """Return name -> packed extra state of each module, and append its large tensors to ``lives``. A forward may
        change extra state. So at the pre-step hook, which comes after the forward, the provisional state is used."""
        if event is not ClosingEvent.PRE_STEP or provisional is None:
            return self._pack_extra_state(lives)
        lives.extend(provisional.extra_large)
        return provisional.extra

    def _pack_extra_state(self, lives: list[Live]) -> dict[str, bytes]:
        return {
            name: values.pack(module.get_extra_state(), path=f"extra_state/{name}", large=_collector(lives, "state"))
            for name, module in self.model.extra
        }


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _collector(lives: list[Live], role: str) -> Callable[[str, torch.Tensor], None]:
    """Return a function for ``large=`` of ``values.pack``, which appends each large tensor to ``lives``."""

    def large(path: str, tensor: torch.Tensor) -> None:
        lives.append(Live(path, role, tensor.detach(), None, None))

    return large

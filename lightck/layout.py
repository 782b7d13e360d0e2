"""Which part of each tensor a rank holds, in tensor parallel code without DTensors (the conventions of Megatron).

::

    from lightck.layout import Fused, Layout, Padded, Shard

    layout = Layout({r".*\\.qkv\\.weight": Fused(0, (512, 128, 128)), r".*\\.proj\\.weight": Shard(1)}, rank, size)
    lightck.attach(model, "pools", layout=layout, resume=True)

A rule says how the plain tensor of each rank (the *local tensor*) lies in the tensor that the model would have in a
single process (the *logical tensor*). A tensor without a rule is whole on every rank. Nothing here knows of torch: a
rule makes pieces from a shape.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightck.errors import LayoutError, listed
from lightck.pool.format.boxes import Ints, check_shape
from lightck.pool.format.pieces import FLAT_NDIM_MAX, Piece, Runs, flat_pieces, pieces_of_runs


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank in a layout: its number, and how many ranks (``size``) hold the parts of a tensor."""

    rank: int
    size: int


class Rule(ABC):
    """What the ranks of a layout hold of one tensor; one of the classes below."""

    __slots__ = ()

    @property
    def agreed_text(self) -> str:
        """The part of the rule that must agree on all ranks, as text."""
        return repr(self)

    @abstractmethod
    def part(self, shape: Ints, place: Place) -> tuple[Ints, tuple[Piece, ...]] | None:
        """Return the logical shape and the pieces of a local tensor of this shape; None if it is the whole tensor.
        Raises ``ValueError``, with a sentence, if the shape does not fit the rule."""


@dataclass(frozen=True, slots=True)
class Replicated(Rule):
    """Every rank holds the whole tensor, as if there were no rule."""

    def part(self, shape: Ints, place: Place) -> None:
        """Return None."""


class _AlongDim(Rule):
    """A rule that cuts one dimension."""

    __slots__ = ()
    dim: int

    def part(self, shape: Ints, place: Place) -> tuple[Ints, tuple[Piece, ...]]:
        """Return the logical shape and the pieces of a local tensor of this shape. Raises as ``Rule.part`` does."""
        if self.dim >= len(shape):
            raise ValueError(f"the tensor has no dimension {self.dim} (the first one is 0)")
        length, runs = self._runs(shape[self.dim], place)
        dims: list[Runs] = [[(0, size)] if size else [] for size in shape]
        dims[self.dim] = _joined(runs)
        return (*shape[: self.dim], length, *shape[self.dim + 1 :]), tuple(pieces_of_runs(dims))

    @abstractmethod
    def _runs(self, length: int, place: Place) -> tuple[int, Runs]:
        """``length``: of the local tensor along ``dim``. Return the length of the logical tensor along ``dim``, and the
        runs of its elements that the rank holds (start and length of each), in the order of the local tensor. Raises
        ``ValueError``."""


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Leave out empty runs, and make one run of two that touch."""
    found: Runs = []
    for start, length in runs:
        if length and found and sum(found[-1]) == start:  # the run before ends where this one begins
            start, length = found[-1][0], found.pop()[1] + length
        if length:
            found.append((start, length))
    return found


@dataclass(frozen=True, slots=True)
class Shard(_AlongDim):
    """The tensors of the ranks, one after the other along dimension ``dim``, are the logical tensor. ``sizes``: the
    length of each rank's tensor there; None: all have the same length."""

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_dim(self, self.dim)
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _checked_sizes(self, self.sizes))

    def _runs(self, length: int, place: Place) -> tuple[int, Runs]:
        if self.sizes is None:
            return length * place.size, [(place.rank * length, length)]
        if len(self.sizes) != place.size:
            raise ValueError(f"the rule has {len(self.sizes)} sizes for {place.size} ranks")
        if self.sizes[place.rank] != length:
            raise ValueError(
                f"the rule gives rank {place.rank} the length {self.sizes[place.rank]}, and the tensor has {length} "
                "there"
            )
        return sum(self.sizes), [(sum(self.sizes[: place.rank]), length)]


@dataclass(frozen=True, slots=True)
class Fused(_AlongDim):
    """The logical tensor is several tensors, one after the other along dimension ``dim``, of these lengths. Each of
    them is divided evenly among the ranks. A rank holds its part of the first, then its part of the second, and so on
    (query, key and value; gate and up)."""

    dim: int
    sizes: tuple[int, ...]
    """Of the whole tensors, and not of a rank's parts."""

    def __post_init__(self) -> None:
        _check_dim(self, self.dim)
        object.__setattr__(self, "sizes", _checked_sizes(self, self.sizes))

    def _runs(self, length: int, place: Place) -> tuple[int, Runs]:
        uneven = next((size for size in self.sizes if size % place.size), None)
        if uneven is not None:
            raise ValueError(f"the size {uneven} cannot be divided among {place.size} ranks evenly")
        whole = sum(self.sizes)
        if whole != length * place.size:
            raise ValueError(
                f"the rule's sizes are {whole} together, and {place.size} ranks with {length} each have "
                f"{length * place.size}"
            )
        runs, begin = [], 0
        for size in self.sizes:
            each = size // place.size
            runs.append((begin + place.rank * each, each))
            begin += size
        return whole, runs


@dataclass(frozen=True, slots=True)
class Padded(_AlongDim):
    """As ``Shard(dim)``, with padding at the end (a vocabulary that was made larger, so that it can be divided). The
    padding is no part of the logical tensor, which has the length ``size`` along ``dim``."""

    dim: int
    size: int

    def __post_init__(self) -> None:
        _check_dim(self, self.dim)
        _checked_sizes(self, (self.size,))

    def _runs(self, length: int, place: Place) -> tuple[int, Runs]:
        if self.size > length * place.size:
            raise ValueError(f"{place.size} ranks with {length} each have {length * place.size}, and not {self.size}")
        start = min(place.rank * length, self.size)
        return self.size, [(start, min(length, self.size - start))]


@dataclass(frozen=True, slots=True)
class Flat(Rule):
    """The rank's tensor has one dimension, and holds the elements ``start`` to ``stop`` (excluded) of the logical
    tensor, in C order: last dimension fastest (ZeRO). Further elements of the rank's tensor are padding. Each rank
    gives its own range, and all ranges together must cover the tensor."""

    shape: tuple[int, ...]
    """Of the logical tensor, with any number of dimensions; the same on all ranks."""
    start: int
    stop: int

    def __post_init__(self) -> None:
        if len(self.shape) > FLAT_NDIM_MAX:
            raise ValueError(f"Flat: the shape {self.shape} has more than {FLAT_NDIM_MAX} dimensions.")
        object.__setattr__(self, "shape", _checked_sizes(self, self.shape) if self.shape else ())
        check_shape(self.shape)
        _checked_sizes(self, (self.start, self.stop))
        if not self.start <= self.stop <= math.prod(self.shape):
            raise ValueError(f"Flat: a tensor of shape {self.shape} has no elements {self.start} to {self.stop}.")

    @property
    def agreed_text(self) -> str:
        """The shape, as text: each rank has its own range."""
        return f"Flat(shape={self.shape!r})"

    def part(self, shape: Ints, place: Place) -> tuple[Ints, tuple[Piece, ...]]:
        """Return the logical shape and the pieces of a local tensor of this shape. Raises as ``Rule.part`` does."""
        length = self.stop - self.start
        if len(shape) != 1 or shape[0] < length:
            raise ValueError(f"the tensor must have one dimension, with at least {length} elements")
        return self.shape, flat_pieces(self.shape, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Average(Rule):
    """Every rank holds the whole tensor, with values of its own (norms under sequence parallelism that drift apart). A
    resume with the same number of ranks gives each rank its own values. If the pools are loaded by another number of
    ranks, each of them gets the mean over the ranks of the saved layout (``size`` of them). Optimizer state of the
    parameter's shape is averaged in the same way. The tensor must be of a floating-point dtype."""

    def part(self, shape: Ints, place: Place) -> None:
        """Return None."""


def uncovered(ranges: Sequence[Mapping[str, Sequence[int]]]) -> str | None:
    """Return a text about elements of a flat tensor that no rank holds; None if there are none. ``ranges``: for each
    rank, ``Layout.ranges``, with the same patterns on all."""
    for pattern in ranges[0] if ranges else ():
        end, size = 0, ranges[0][pattern][2]
        for start, stop, _ in sorted(tuple(one[pattern]) for one in ranges):
            if start > end:
                break
            end = max(end, stop)
        if end < size:
            return f"the elements from {end} on of the tensors that match {pattern!r}"
    return None


def _check_dim(rule: Rule, dim: object) -> None:
    if type(dim) is not int or dim < 0:
        raise ValueError(f"{type(rule).__name__}: dim={dim!r}. Pass the number of a dimension, from 0.")


def _checked_sizes(rule: Rule, sizes: Sequence[object]) -> tuple[int, ...]:
    """Return the sizes as a tuple. Raises ``ValueError``."""
    if not isinstance(sizes, Sequence):
        raise ValueError(f"{type(rule).__name__}: {sizes!r} is no tuple. Pass the sizes as a tuple: ({sizes!r},).")
    found = tuple(size for size in sizes if type(size) is int and size >= 0)
    if len(found) != len(sizes) or not found:
        raise ValueError(
            f"{type(rule).__name__}: {sizes!r} cannot be used. Pass ints of at least 0, and at least one of them."
        )
    return found


@dataclass(frozen=True, slots=True)
class Rename:
    """Gives tensors of this rank the names that they have in the whole model; see :func:`rename`."""

    pattern: re.Pattern[str]
    to: str | Callable[[re.Match[str]], str]

    def __call__(self, name: str) -> str | None:
        """Return the new name; None if the pattern matches no part of ``name``. Raises ``LayoutError`` if the
        replacement cannot be used."""
        if self.pattern.search(name) is None:
            return None
        try:
            found = self.pattern.sub(self.to, name, count=1)
        except (re.error, IndexError, TypeError, ValueError) as err:
            raise LayoutError(
                f"The replacement of rename({self.pattern.pattern!r}, ...) of layout= cannot be used for the tensor "
                f"{name!r}: {err}. Pass a text in which \\1 is the first group, or a function that returns a text."
            ) from err
        if not found:
            raise LayoutError(
                f"rename({self.pattern.pattern!r}, ...) of layout= makes the name of the tensor {name!r} empty."
            )
        return found


def rename(
    pattern: str, to: str | Callable[[re.Match[str]], str] | None = None, *, offset: int | None = None
) -> Rename:
    """Return a rule for names that differ between this rank and the whole model (pipeline stages), for
    ``Layout(..., rename=[...])``. What the pool keeps are the resulting names.

    Args:
        pattern: a regular expression. The first part of a tensor's name that it matches is replaced. The name is that
            of a parameter, a buffer or a module's extra state on this rank, as in its state_dict (without wrappers).
        to: the replacement, as of ``re.sub``: a text in which ``\\1`` is the first group, or a function of the match.
        offset: used in place of ``to``: a number to add to the one that the first group of the pattern matches. So the
            index of a layer in its stage becomes its index in the model: ``rename(r"layers\\.(\\d+)\\.", offset=8)``.

    Raises ``TypeError`` if both or neither of ``to`` and ``offset`` are given; ``LayoutError`` for a pattern that is no
    regular expression, or has no group where ``offset`` needs one, and for an ``offset`` that is no int."""
    compiled = _compiled(pattern)
    if (to is None) == (offset is None):
        raise TypeError(f"rename({pattern!r}): pass either the replacement or offset=.")
    if to is not None:
        return Rename(compiled, to)
    if type(offset) is not int or not compiled.groups:
        raise LayoutError(
            f"rename({pattern!r}, offset={offset!r}) of layout=: the offset is an int, and is added to the number that "
            r"the first group of the pattern matches: rename(r'layers\.(\d+)\.', offset=8)."
        )
    return Rename(compiled, _Offset(offset))


@dataclass(frozen=True, slots=True)
class _Offset:
    """Adds a number to the first group of a match."""

    number: int

    def __call__(self, match: re.Match[str]) -> str:
        (start, stop), whole = match.span(1), match.group()
        at = match.start()
        moved = int(match.group(1)) + self.number
        if moved < 0:
            raise ValueError(f"the number {match.group(1)} with the offset {self.number} is below 0")
        return f"{whole[: start - at]}{moved}{whole[stop - at :]}"


class Layout:
    """Which part of each tensor this rank holds: ``layout=`` of :func:`lightck.attach` and :func:`lightck.recover`.

    Args:
        rules: pattern -> ``Shard``, ``Fused``, ``Padded``, ``Flat``, ``Replicated`` or ``Average``. A pattern is a
            regular expression that matches the whole name of a parameter or buffer, as in the state_dict of the plain
            model. No name may be matched by two patterns, and each pattern must match at least one name (with stages,
            on at least one stage). Optimizer state of the parameter's shape follows it.
        rank: the number of this rank among those that hold the parts of one tensor (the tensor parallel rank).
        size: how many ranks hold the parts of one tensor.
        stage: the number of the pipeline stage of this rank.
        stages: how many stages there are. With more than one, the ranks of different stages build different tensors.
            All stages together hold the model. A tensor that several stages have under one name is the same on all.
        rename: a list of what ``rename`` returned, if names differ on this rank from those in the whole model. No name
            may be matched by two of them, and each must match at least one name. Patterns of ``rules`` match the
            resulting names.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        rank: int,
        size: int,
        *,
        stage: int = 0,
        stages: int = 1,
        rename: Iterable[Rename] = (),
    ) -> None:
        for number, count, what, of in ((rank, size, "rank", "size"), (stage, stages, "stage", "stages")):
            if type(number) is not int or type(count) is not int or not 0 <= number < count:
                raise ValueError(
                    f"{what}={number!r}, {of}={count!r}: pass the number of {what}s as {of}=, and as {what}= a number "
                    f"from 0 to {of} - 1."
                )
        if isinstance(rename, Rename):
            raise TypeError("rename= is one renaming. Pass a list: rename=[lightck.layout.rename(...)].")
        self._renames = list(rename)
        for one in self._renames:
            if not isinstance(one, Rename):
                raise TypeError(f"rename= has a {type(one).__name__}. Pass what lightck.layout.rename returns.")
        for pattern, rule in rules.items():
            if isinstance(rule, type):
                raise TypeError(
                    f"the rule of {pattern!r} is the class {rule.__name__}. Pass an object of it: Shard(0)."
                )
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"the rule of {pattern!r} is a {type(rule).__name__}. Pass Shard(dim), Fused(dim, sizes) or "
                    "another rule."
                )
        self.place = Place(rank, size)
        self.stage, self.stages = stage, stages
        self._rules = [(_compiled(pattern), rule) for pattern, rule in rules.items()]
        self._rule_by_name: dict[str, Rule | None] = {}
        """Name of a tensor -> what ``rule_of`` has returned for it."""

    def __repr__(self) -> str:
        of_stages = f", stage={self.stage}, stages={self.stages}" if self.stages > 1 else ""
        return f"Layout({self._rules_by_pattern()}, rank={self.place.rank}, size={self.place.size}{of_stages})"

    @property
    def coordinate(self) -> Ints:
        """The place of this rank: stage and rank; without stages, the rank."""
        return (self.stage, self.place.rank) if self.stages > 1 else (self.place.rank,)

    @property
    def mesh_shape(self) -> Ints:
        """How many places there are along each dimension of ``coordinate``."""
        return (self.stages, self.place.size) if self.stages > 1 else (self.place.size,)

    def _rules_by_pattern(self) -> dict[str, Rule]:
        return {pattern.pattern: rule for pattern, rule in self._rules}

    @property
    def description(self) -> str:
        """What must be the same on all ranks, as a text."""
        rules = sorted(f"{pattern!r}: {rule.agreed_text}" for pattern, rule in self._rules_by_pattern().items())
        of_stages = f", stages={self.stages}" if self.stages > 1 else ""
        return f"{{{', '.join(rules)}}}, size={self.place.size}{of_stages}"

    @property
    def ranges(self) -> dict[str, tuple[int, int, int]]:
        """Pattern -> start, stop and number of elements of the logical tensor, of each ``Flat``."""
        flat = {pattern: rule for pattern, rule in self._rules_by_pattern().items() if isinstance(rule, Flat)}
        return {pattern: (rule.start, rule.stop, math.prod(rule.shape)) for pattern, rule in flat.items()}

    def name_of(self, local_name: str) -> str:
        """Return the name of a tensor in the whole model. Raises ``LayoutError`` if two renames match."""
        found = [(one, new) for one in self._renames if (new := one(local_name)) is not None]
        if len(found) > 1:
            raise LayoutError(
                f"Two renames of layout= match the tensor {local_name!r}: {found[0][0].pattern.pattern!r} and "
                f"{found[1][0].pattern.pattern!r}. Write the patterns so that one of them matches."
            )
        return found[0][1] if found else local_name

    def rule_of(self, name: str) -> Rule | None:
        """Return the rule for the tensor of this name; None if there is none. Raises ``LayoutError`` if there are
        two."""
        if name not in self._rule_by_name:
            matching = [(pattern.pattern, rule) for pattern, rule in self._rules if pattern.fullmatch(name)]
            if len(matching) > 1:
                raise LayoutError(
                    f"Two rules of layout= match the tensor {name!r}: {matching[0][0]!r} and {matching[1][0]!r}, so "
                    "nobody knows which part of it a rank holds. Write the patterns so that one of them matches."
                )
            self._rule_by_name[name] = matching[0][1] if matching else None
        return self._rule_by_name[name]

    def averaged(self, names: Iterable[str]) -> set[str]:
        """Return those of these names for which the rule is ``Average``."""
        return {name for name in names if isinstance(self.rule_of(name), Average)}

    def part(self, name: str, rule: Rule, shape: Ints) -> tuple[Ints, tuple[Piece, ...]] | None:
        """Return the logical shape and the pieces of a local tensor; None if it is the whole tensor. Raises
        ``LayoutError``. ``name``: for the error."""
        try:
            return rule.part(shape, self.place)
        except ValueError as err:
            raise LayoutError(
                f"The rule {rule!r} of layout= does not fit the tensor {name!r}, which has the shape {list(shape)} on "
                f"rank {self.place.rank} of {self.place.size}: {err}. Correct the rule. dim= is the dimension along "
                "which the ranks hold parts. Shard takes the length of each rank's tensor. Fused and Padded take "
                "lengths of the whole tensor, as a single process would have it. Flat takes the shape of the whole "
                "tensor, and the range of its elements that this rank holds."
            ) from err

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Raise ``LayoutError`` if a rule matches none of these names, which are those of all tensors. With stages a
        rule may match on another stage."""
        known = list(names)
        unused = self.unused(known) if self.stages == 1 else []
        if unused:
            raise LayoutError(
                f"The rule {unused[0]!r} of layout= matches no parameter and no buffer of the model, whose tensors "
                f"are {listed(known) or 'none'}. A pattern matches the whole name: write r'.*\\.weight' for all "
                "weights. Correct the pattern, or remove the rule."
            )

    def unused(self, names: Sequence[str]) -> list[str]:
        """Return the patterns of the rules that match none of these names."""
        return [one.pattern for one, _ in self._rules if not any(one.fullmatch(name) for name in names)]

    def refuse_unused_renames(self, local_names: Iterable[str]) -> None:
        """Raise ``LayoutError`` if a rename matches none of these names, which are those of all tensors on this
        rank."""
        known = list(local_names)
        for one in self._renames:
            if not any(one.pattern.search(name) for name in known):
                raise LayoutError(
                    f"rename({one.pattern.pattern!r}, ...) of layout= matches no tensor of this rank, whose tensors "
                    f"are {listed(known) or 'none'}. Correct the pattern, or leave it out on this rank."
                )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as err:
        raise LayoutError(
            f'The pattern {pattern!r} of layout= is no regular expression: {err}. Correct it; "\\." stands for a dot.'
        ) from err


def check_layout_argument(layout: object, *, is_used: bool) -> None:
    """Raise ``TypeError`` for a ``layout=`` that is no ``Layout``, and ``LayoutError`` for any ``layout=`` that would
    not be used. ``is_used``: whether there is a group of ranks, whose parts ``layout=`` describes."""
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is a {type(layout).__name__}. Pass lightck.layout.Layout(rules, rank=..., size=...).")
    if not is_used:
        raise LayoutError(
            "layout= says which part of each tensor a rank holds, and there is no group of ranks here: this call is an "
            "attach in a single process, in a group of one rank or with group=False, or a recover without a model or "
            "from the pool of a single process. Leave layout= out; or pass the directory of a group of ranks, to go on "
            "from there."
        )

"""The arguments of ``attach`` in a group of ranks: what a group cannot do, and what must be equal on all ranks."""

from __future__ import annotations

from lightck.errors import UnsupportedError
from lightck.session.arguments import Arguments
from lightck.session.base_every import AUTO


def refuse_unsupported(arguments: Arguments, world_size: int) -> None:
    """Raise ``UnsupportedError`` or ``ValueError`` for what a group cannot do yet."""
    options = arguments.save_options
    is_adaptive = type(options.interval) is not int
    refused = (
        (
            is_adaptive and bool(options.tiers),
            f"interval={options.interval!r} together with tiers=",
            "the ranks agree on a step to send before they know whether it is saved",
        ),
        (
            is_adaptive and options.replicas.count > 1,
            f"interval={options.interval!r} together with replicas=",
            "copies are due at fixed numbers of steps, which the ranks perhaps do not save",
        ),
        (
            options.exports is not None,
            options.exports_argument,
            "use `lightck export` on the directory, also while training runs",
        ),
        (
            any(tier.keep_best is not None for tier in options.tiers),
            "Tier(keep_best=...)",
            "the ranks would have to agree on a step that has passed; keep_every= keeps steps that are known before",
        ),
        (
            options.pause_on_nonfinite and options.gradients is not None,
            "pause_on_nonfinite=True together with strategy=Gradients()",
            "an update that is not stored leaves a hole in the gradient records of this rank, and not of the others",
        ),
        (
            options.pause_on_nonfinite and options.replicas.count > 1,
            "pause_on_nonfinite=True together with replicas=",
            "a rank that pauses copies nothing, and the others would wait for its copy",
        ),
        (arguments.backend == "devdax", 'backend="devdax"', "a device holds one pool"),
        (options.replica_strategy is not None, "strategy=Replica()", "it makes no copies of tensors that ranks divide"),
        (
            options.gradients is not None and options.gradients.base_every == AUTO,
            'Gradients(base_every="auto")',
            "each rank would choose a number of its own",
        ),
    )
    for is_passed, what, why in refused:
        if is_passed:
            cure = "pass group=False, to save this process alone"
            if world_size == 1:
                cure = "load the model with lightck.recover(directory, model, optimizer), and attach it to a file"
            raise UnsupportedError(f"{what} is not supported in a group of ranks yet ({why}). Leave it out; or {cure}.")
    if options.slots is not None and options.slots < options.replicas.slots_min:
        more = ", and the newest one that all peer copies have" if options.replicas.count > 1 else ""
        raise ValueError(
            f"slots={options.slots}: in a group of ranks a pool has at least {options.replicas.slots_min} slots, "
            f"because a rank must keep a checkpoint until all ranks have committed a newer one{more}."
        )
    if isinstance(options.interval, int):
        options.replicas.check(options.interval)
    _refuse_old_fsdp(arguments)


def arguments_to_compare(arguments: Arguments) -> dict[str, str]:
    """Return the arguments of attach that must be the same on all ranks: name -> text."""
    options, strategy = arguments.save_options, arguments.save_options.chosen_strategy
    return {
        "interval=": repr(options.interval),
        "pause_on_nonfinite=": repr(options.pause_on_nonfinite),
        "slots=": repr(options.slots),
        "resume=": repr(arguments.resume),
        "overwrite=": repr(arguments.overwrite),
        "strategy=": repr(strategy) if options.gradients is not None else type(strategy).__name__,
        "strict_data=": repr(options.strict_data),
        "tiers=": "; ".join(map(str, options.tiers)) or "None",
        "split=": repr(options.split),
    }


def _refuse_old_fsdp(arguments: Arguments) -> None:
    for module in arguments.model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise UnsupportedError(
                "The model contains FullyShardedDataParallel, whose flat parameters do not say which part of a tensor "
                "a rank holds. Use torch.distributed.fsdp.fully_shard, which takes its place."
            )

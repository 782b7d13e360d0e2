"""Which training saved a checkpoint: two values of the small state, read without torch.

``lightck.state.values`` reads all of the small state, and needs torch for the tensors in it. The process that sends
checkpoints to tiers runs without torch, and needs only these two values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from lightck.pool.format.structures import DamagedError

RUN_ID_KEY, RUN_ID_NBYTES = "run", 16
"""Key of the small state under which the id of the training lies, and the length of the id. In the small state the id
is written with hexadecimal digits."""
CLAIM_KEY = "claim"
"""Key of the small state under which the training's newest claim on its tiers lies, as text (``Claim``,
``tiers/names.py``). Absent if the training never had tiers."""
_DICT = 2
"""Code of the extension type of a dict (docs/format.md, "Small state")."""


class SavedBy(NamedTuple):
    """The training that saved a checkpoint. A value is empty if the small state does not have it."""

    run_id: str
    claim: str


def saved_by(small_state: bytes) -> SavedBy:
    """Read the run and the claim from a small state. Raises ``DamagedError`` if the bytes are
    no valid small state."""
    try:
        outer = msgpack.unpackb(small_state, ext_hook=msgpack.ExtType, strict_map_key=False)
        if not isinstance(outer, msgpack.ExtType) or outer.code != _DICT:
            raise DamagedError("its saved options, counters or random states are malformed")
        pairs = msgpack.unpackb(outer.data, ext_hook=msgpack.ExtType, strict_map_key=False)
        found: dict[Any, Any] = {key: value for key, value in pairs if type(key) is str}
    except (ValueError, TypeError, RecursionError) as err:
        raise DamagedError("its saved options, counters or random states are malformed") from err
    run_id, claim = found.get(RUN_ID_KEY, ""), found.get(CLAIM_KEY, "")
    if type(run_id) is not str or type(claim) is not str:
        raise DamagedError("its saved options, counters or random states are malformed")
    return SavedBy(run_id, claim)

"""What a training says to its drain arrives whole."""

from __future__ import annotations

import socket

from lightck.ranks.directory import pool_name
from lightck.tiers.drain_messages import DrainSettings, TierSettings, receive_message, send_message


def test_the_settings_of_a_group_of_thousands_of_ranks_arrive():
    world_size, directory = 4000, "/dev/shm/" + "d" * 200
    pools = tuple(f"{directory}/{pool_name(rank, world_size)}" for rank in range(world_size))
    tier = TierSettings("/nowhere", None, 100, None, None, None, has_parent=False)
    settings = DrainSettings(
        pools[7], "000001-9f3a61c2", "test", None, (tier,), 1.0, 7, world_size=world_size, pools_of_ranks=pools
    )
    training, drain = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with training, drain:
        assert send_message(training, settings.packed())
        message = receive_message(drain)
    assert message is not None
    assert DrainSettings.unpacked(message) == settings

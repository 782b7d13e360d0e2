"""The functions of ``lightck/ranks/rule.py``, one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightck.ranks.rule import (
    Adoption,
    CheckpointId,
    Knowledge,
    PoolView,
    commits_within_boundary,
    copies_to_keep,
    is_dead,
    may_start_from_nothing,
    never_common,
    newest_common,
    next_incarnation,
    reported,
)

ids = st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 5))
pools = st.frozensets(ids, max_size=4)


def at(*steps: int, incarnation: int = 1) -> frozenset[CheckpointId]:
    return frozenset(CheckpointId(incarnation, step) for step in steps)


def one(step: int, incarnation: int = 1) -> CheckpointId:
    return CheckpointId(incarnation, step)


def test_newer_incarnation_is_newer_whatever_the_step():
    assert one(1, incarnation=2) > one(9)


def test_common_is_in_every_pool_and_not_the_oldest_of_the_newest():
    assert newest_common([at(0, 1, 3), at(0, 2)]) == one(0)
    assert newest_common([at(0), at(1)]) is None
    assert newest_common([]) is None


def test_what_an_adoption_leaves_behind_does_not_count():
    adoption = Adoption(one(2), 2)
    assert reported(at(1, 2, 3) | at(3, incarnation=2), adoption) == at(1, 2) | at(3, incarnation=2)
    assert reported(at(0), Adoption(None, 2)) == frozenset()
    assert not is_dead(one(9), None)


def test_incarnation_is_new_to_all():
    assert next_incarnation([]) == 1
    assert next_incarnation([1, 4, 2]) == 5


def test_training_starts_from_nothing_only_if_nobody_has_gone_past_step_0():
    assert may_start_from_nothing([at(0), frozenset()])
    assert not may_start_from_nothing([at(0), at(1)])


def test_what_another_rank_has_gone_past_can_never_become_common():
    assert never_common(at(0, 1, 3), [PoolView.of(at(0, 2))]) == at(1)
    assert never_common(at(0, 1), [PoolView.of(at(0))]) == frozenset()
    assert never_common(at(0, 1), [PoolView.of(frozenset())]) == frozenset()


def test_rank_that_no_longer_holds_its_newest_has_gone_past_it():
    assert never_common(at(2), [PoolView.of(at(0, 1), newest=one(3))]) == at(2)


def test_views_together_say_what_each_of_them_says():
    both = PoolView.together([PoolView.of(at(0, 1)), PoolView.of(at(0, 2))])
    assert both == PoolView(at(0), one(1))
    assert PoolView.together([both, PoolView.of(frozenset())]) == PoolView(frozenset(), None)


def test_rank_waits_while_nothing_newer_is_common():
    known = Knowledge(one(0)).learn(at(0, 1, 2), [PoolView.of(at(0))])
    assert known.slot_to_write({0: one(0), 1: one(1), 2: one(2)}) is None


def test_rank_overwrites_the_oldest_once_a_newer_one_is_common():
    known = Knowledge(one(0)).learn(at(0, 1, 2), [PoolView.of(at(0, 1))])
    assert known.slot_to_write({0: one(1), 1: one(2), 2: one(0)}) == 2
    assert not known.may_overwrite(one(1))
    assert not known.may_overwrite(one(2))


def test_empty_slot_goes_first_then_what_is_useless_then_the_oldest():
    known = Knowledge(one(1), None, at(2))
    assert known.slot_to_write({0: one(0), 1: one(2), 2: None}) == 2
    assert known.slot_to_write({0: one(0), 1: one(2), 2: one(3)}) == 1
    assert known.slot_to_write({0: one(0), 1: one(1)}) == 0


def test_adopted_checkpoint_stays_though_a_rank_lost_its_pool():
    known = Knowledge.at_start(Adoption(one(5), 2))
    known = known.learn(at(5) | at(6, incarnation=2), [PoolView.of(at(7, incarnation=2))])
    assert not known.may_overwrite(one(5))
    assert known.may_overwrite(one(6, incarnation=2))


def test_what_was_left_behind_may_be_overwritten():
    known = Knowledge.at_start(Adoption(one(1), 2))
    assert known.may_overwrite(one(2))
    assert not known.may_overwrite(one(1))


def test_file_of_before_stays_until_a_checkpoint_of_the_new_one_is_common():
    old, new = at(3, 4), at(5)
    known = Knowledge(one(3))
    assert not known.learn(old | new, [PoolView.of(at(3, 4))]).may_remove(old)
    assert known.learn(old | new, [PoolView.of(at(4, 5))]).may_remove(old)
    assert known.may_remove(frozenset())


def with_copies(copied: int, every: int = 2) -> Knowledge:
    return Knowledge(one(copied), copied=one(copied), copy_every=every)


def test_pool_keeps_what_is_copied_and_what_is_due_for_copies_below_the_common_one():
    known = with_copies(0).learn(at(0, 1, 2, 3), [PoolView.of(at(0, 1, 2, 3))])
    assert known.common == one(3)
    assert [step for step in range(4) if known.may_overwrite(one(step))] == [1]
    assert known.slot_to_write({0: one(0), 1: one(2), 2: one(3)}) is None


def test_pool_lets_an_older_copied_checkpoint_go_once_a_newer_one_is_copied():
    known = with_copies(0).learn(at(0, 2, 3, 4), [PoolView.of(at(0, 2, 3, 4))], copied=at(0, 2))
    assert known.copied == known.floor == one(2)
    assert [step for step in (0, 2, 3, 4) if known.may_overwrite(one(step))] == [0, 3]


def test_what_is_in_all_copies_is_common():
    assert with_copies(0).learn(at(0, 1, 2), [PoolView.of(at(0))], copied=at(0, 2)).common == one(2)


def test_nothing_is_due_while_there_are_no_copies_or_the_number_is_not_known():
    for known in (Knowledge(one(3)), Knowledge(one(3), copy_every=2), with_copies(0, every=0)):
        assert known.next_to_copy(at(2, 4), ()) is None
        assert replace(known, common=one(3)).may_overwrite(one(2))


def test_oldest_due_checkpoint_is_copied_first():
    assert with_copies(0).next_to_copy(at(0, 1, 2, 3, 4), at(0)) == one(2)
    assert with_copies(0).next_to_copy(at(0, 1, 2, 3, 4), at(0, 2)) == one(4)
    assert with_copies(2).next_to_copy(at(0, 1, 2, 3), at(0)) is None


def test_what_cannot_become_common_is_not_copied():
    known = with_copies(0).learn(at(0, 1, 2, 4), [PoolView.of(at(0, 1, 3))])
    assert known.next_to_copy(at(0, 1, 2, 4), at(0)) == one(4)
    assert replace(known, adoption=Adoption(one(2), 2)).next_to_copy(at(0, 1, 2, 4), at(0)) is None


def test_copy_drops_what_is_older_than_the_newest_in_all_copies():
    known = with_copies(2)
    assert [step for step in range(5) if known.may_drop_copy(one(step))] == [0, 1]
    assert not Knowledge(one(4)).may_drop_copy(one(2)), "it does not know what is in all copies"


def test_copy_drops_what_its_pool_has_overwritten_as_never_common():
    """Else a copy with room for two checkpoints would keep it for ever, and the group would stop."""
    others = [PoolView.of(at(0, 1, 3, 4))]
    known = with_copies(0).learn(at(0, 1, 2, 3), others, in_copy=at(0, 2))
    assert known.may_overwrite(one(2))
    known = known.learn(at(0, 3, 4), others, in_copy=at(0, 2))
    assert known.may_drop_copy(one(2))
    assert not known.may_drop_copy(one(0))


def test_what_is_in_the_copy_alone_is_not_common():
    known = Knowledge(one(0)).learn(at(0), [PoolView.of(at(0, 2))], in_copy=at(2))
    assert known.common == one(0)


def test_older_news_than_the_floor_are_not_needed_and_newer_ones_are():
    """A neighbour's view without what is older than the common checkpoint would make due checkpoints useless."""
    known, own = with_copies(0), at(0, 2, 3)
    full = known.learn(own, [PoolView.of(own)])
    assert full.floor == one(0)
    assert full.never_common == frozenset()
    above_common = PoolView.of(each for each in own if each >= full.common)
    assert full.learn(own, [above_common]).may_overwrite(one(2)), "this is why views are cut at the floor"


def test_views_together_have_the_copies_that_all_have():
    views = [PoolView.of(at(0, 2, 4), copied=at(0, 2)), PoolView.of(at(0, 2, 3), copied=at(2))]
    assert PoolView.together(views).copied == at(2)


def test_after_a_recovery_the_adopted_and_the_newest_in_all_copies_stay():
    assert copies_to_keep(one(3), [at(0, 2), at(0)]) == at(0, 3)
    assert copies_to_keep(one(3), [at(0, 2), at()]) == at(3)


def test_checkpoint_after_one_that_was_given_up_commits_within_the_boundary():
    assert commits_within_boundary(one(2), one(1))
    assert commits_within_boundary(one(1), None)
    assert not commits_within_boundary(one(2), one(2))
    assert not commits_within_boundary(None, one(2))


@given(st.lists(pools, min_size=1, max_size=4))
def test_newest_common_is_common_and_nothing_newer_is(sets):
    found = newest_common(sets)
    everywhere = [each for each in set().union(*sets) if all(each in held for held in sets)]
    assert found == max(everywhere, default=None)


@given(pools, st.lists(pools, max_size=3), st.none() | ids)
def test_no_news_takes_the_common_checkpoint_away(own, others, before):
    """Whatever a rank learns: it overwrites neither the newest that it knows to be common, nor one that is newer and
    that every other rank has, or may still commit."""
    known = Knowledge(before).learn(own, [PoolView.of(held) for held in others])
    assert before is None or known.common >= before
    assert known.common is None or not known.may_overwrite(known.common)
    for checkpoint in own:
        may_be_common = all(checkpoint in held or checkpoint > max(held, default=one(0, 0)) for held in others)
        if may_be_common and (known.common is None or checkpoint >= known.common):
            assert not known.may_overwrite(checkpoint)


@given(pools, st.lists(pools, min_size=1, max_size=3))
def test_views_together_never_say_more_than_each(own, others):
    views = [PoolView.of(held) for held in others]
    assert never_common(own, [PoolView.together(views)]) <= never_common(own, views)
    assert newest_common([own, PoolView.together(views).committed]) == newest_common([own, *others])


@given(pools, pools, pools)
def test_order_of_putting_views_together_does_not_matter(a, b, c):
    one_way, other_way = [PoolView.of(each) for each in (a, b, c)], [PoolView.of(each) for each in (c, b, a)]
    pair = PoolView.together(one_way[:2])
    assert PoolView.together([pair, one_way[2]]) == PoolView.together(other_way)


@given(pools, ids, st.integers(1, 3))
def test_a_rank_that_adopts_again_reports_the_same_again(held, adopted, incarnation):
    """A crash between two adoptions of one verdict changes no report, and the adopted checkpoint is never dead."""
    adoption = Adoption(adopted, max(incarnation, adopted.incarnation + 1))
    once = reported(held | {adopted}, adoption)
    assert reported(once, adoption) == once
    assert adopted in once


@given(st.dictionaries(st.integers(0, 3), st.none() | ids, min_size=1), st.none() | ids, pools)
def test_slot_is_one_that_may_be_overwritten(contents, common, useless):
    known = Knowledge(common, None, useless)
    slot = known.slot_to_write(contents)
    if slot is None:
        assert not any(known.may_overwrite(content) for content in contents.values())
    else:
        assert known.may_overwrite(contents[slot])


@given(pools, st.lists(pools, max_size=3), ids, pools, pools, st.integers(0, 3))
def test_no_news_takes_a_copied_or_due_checkpoint_away(own, others, before, copied, in_copy, every):
    """Whatever a rank learns: it keeps the newest checkpoint that it knows to be in all copies, in its pool and in its
    copy, and each newer due one that every other rank has, or may still commit."""
    known = Knowledge(before, copied=before, copy_every=every)
    known = known.learn(own, [PoolView.of(held) for held in others], copied, in_copy)
    assert known.copied == known.floor == max([before, *copied])
    assert known.common >= known.copied
    assert not known.may_overwrite(known.copied)
    assert not known.may_drop_copy(known.copied)
    for checkpoint in own | in_copy:
        may_be_common = all(checkpoint in held or checkpoint > max(held, default=one(0, 0)) for held in others)
        if may_be_common and checkpoint >= known.copied:
            assert not known.may_drop_copy(checkpoint)
            if every and checkpoint.step % every == 0:
                assert not known.may_overwrite(checkpoint)


@given(pools, pools, ids, st.integers(1, 3))
def test_what_is_copied_next_is_kept_until_all_copies_have_it(own, in_copy, copied, every):
    known = Knowledge(copied, copied=copied, copy_every=every)
    following = known.next_to_copy(own, in_copy)
    if following is None:
        assert all(one <= copied or one in in_copy or one.step % every for one in own)
    else:
        assert following in own - in_copy
        assert not known.may_overwrite(following)
        assert not known.may_drop_copy(following)


@given(pools, st.lists(pools, min_size=1, max_size=3), ids, st.integers(1, 3))
def test_news_older_than_the_floor_change_nothing(own, others, copied, every):
    known = Knowledge(copied, copied=copied, copy_every=every)
    views = [PoolView.of(held) for held in others]
    cut = [PoolView(frozenset(c for c in view.committed if c >= known.floor), view.newest) for view in views]
    assert known.learn(own, cut) == known.learn(own, views)

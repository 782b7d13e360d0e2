"""The functions of ``lightck/ranks/rule.py``, one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightck.ranks.rule import (
    Adoption,
    CheckpointId,
    Knowledge,
    PoolView,
    commits_within_boundary,
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

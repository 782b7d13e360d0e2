"""The commit rule of ranks, checked: ``model.py`` is the model, ``topology.py`` how ranks wait for each other,
``carrying.py`` relayouts as they are built, ``copying.py`` peer copies and lost hosts, ``explore.py`` the search,
``mutants.py`` what is wrong.

``test_model.py`` has a row for each claim, and ``test_copying.py`` one for each about peer copies, with what must come
out and how many states there are (``rows.py``). A row that fails prints the events that lead to the failure.
``test_rule.py`` looks at single functions.

All rows take 75 s on one core (Python 3.11). The largest ones are run by hand (``large_models.py``).

Ranks go on at once where they have no choice, and ranks that are alike are one and the same to the search. So a mesh of
2 x 2 has 325 states; an earlier model, without that, had 436,656. ``test_going_on_at_once_hides_nothing`` compares
small groups with and without the first.

Not explored to the end: three ranks that read each pool at a moment of its own (more than 200,000 states), and
relayouts that keep the file of before, with a crash and a give-up (more than 150,000). Pools that are lost without a
peer copy are not in the model.

What came out otherwise than the first design of the groups said, or more exactly:

1. *A second reason to overwrite.* If a rank overwrites only what is older than a common checkpoint, the group can stop
   for ever. Two ranks give up checkpoints in turn, three times (1, 2, 3), and begin 4: one holds 0, 1, 3, the other
   0, 2, 4, and the first has no slot left. With ``never_common`` it goes on. Any number of give-ups was explored, with
   up to 5 of them newer than the newest common checkpoint (2 ranks), up to 3 (3 ranks), up to 2 (4 ranks).
2. *What neighbours must publish* for that: the committed checkpoints, and the newest that the rank ever committed. The
   newest that it still *holds* is too little between hosts. A rank may overwrite its newest checkpoint as one that can
   never become common, and give up the next. Then it seems to have fallen back, and a host that sees only what ranks
   have together waits for ever (3 ranks on 2 hosts, 3 give-ups). To read the newest later than the others is unsafe.
3. *Two given up in a row* by one rank, with none committed within the boundary, stop the group only without
   ``never_common``. With it, three do. So the checkpoint that is committed within the boundary is still needed.
4. *Records that are not acknowledged*, with three slots. Without give-ups they are safe wherever each update needs the
   gradients of all ranks: data parallel, meshes, 2 to 4 pipeline stages. There a rank begins t + 1 only when all have
   passed the gate of t - 1, and it still has t - 1. They are unsafe with 3 pipeline stages and one give-up, in data
   parallel with the last gate alone and two give-ups, without collectives, and where a collective comes only in every
   third step (local SGD). With two slots they are unsafe on 2 pipeline stages.
5. *What an adoption leaves behind.* If ranks still report it, no row becomes unsafe: that the incarnation is part of a
   checkpoint's name is enough. That a rank may *overwrite* it is needed: else two ranks with give-ups and two crashes
   stop for ever.
6. *Arbitrary skips* are always safe. But a rank that leaves out as many checkpoints in a row as there are slots stops
   the others: with three slots, three in a row.
7. *The loss* is what the design promises, and one more for each step newer than the common one whose checkpoint was
   given up by any rank (so more than "one more", where ranks give up in turn). Without collectives, or with one in each
   third step, it is three with 3 slots, and six while a pool also keeps a file of before.
8. *Two slots* are safe by the rule and do not stop, also with give-ups; what they cost is waiting.
9. *Relayouts* are safe in two ways: the file of before stays beside the new one, or the new one holds what may not be
   overwritten before it gets the name. The second is built; it has fewer states, so crashes and give-ups are explored
   with it to the end. To carry over the newest checkpoint alone, or the known common one alone, is unsafe; also under
   new names.
10. *Damage* to the common checkpoint of one rank leaves the one before only as long as no checkpoint was given up: with
   one give-up it may leave none, also with three slots and an early gate.
11. *Peer copies*: any one host can be lost at any moment, also again before the copies are whole after a recovery. What
    a crash costs then depends on how often checkpoints are due: with every second step six steps (4 slots), with every
    third eight. Three slots are safe and do not stop either; they only wait longer. Two stop at once, and so do copies
    with room for one checkpoint. Each part of the rule is needed: the rows of ``test_copying.py`` that are wrong leave
    one out each.
12. *What is in the copy alone.* A pool may overwrite a checkpoint as one that can never become common before its copy
    drops it. A rank that then no longer knows this keeps it in the copy for ever, and one give-up stops the group
    (``Knowledge.learn(in_copy=)``).
13. *Recovery with copies.* Each rank copies the adopted checkpoint before training goes on. Until then the copies keep
    the newest checkpoint that all of them have. To drop it is unsafe, and to keep everything that is not dead leaves no
    room (``copies_to_keep``).
"""

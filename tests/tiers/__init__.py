"""What a tier's drains, retention and readers decide, checked: ``tier_model.py`` is the model, ``tier_explore.py`` the
search and the random runs, ``tier_mutants.py`` what is wrong. ``test_tier_model.py`` has a row for each claim.

A drain sleeps, or is killed, between a listing and what it does next. In the rows with ``is_fine=False`` it sleeps only
where that can matter (``Model._acts_at_once``); the rows for one rank are explored in both ways. The largest rows, and
100,000 random runs with late listings and late requests, are run by hand: ``large_tier_models.py``.

What came out otherwise than the first design of the tiers said, or more exactly:

1. *Names that one attempt uses.* An object that was named by its content alone could be put again while an earlier
   deletion of it was still on its way: the drain had been killed after it had sent that request (``UsesWhatItFinds``).
   A manifest that was named by its step alone could be overwritten by that of an attempt before. So both have a nonce,
   and an object is used again only if a manifest that was read names it.
2. *A drain that has just begun* deletes no object before the grace has passed. A late listing does not show what the
   drain before it wrote last, and the objects that this manifest names look like what nothing needs.
3. *What a drain has written itself* counts as named before a listing shows it.
4. *Below the claim of the newest complete checkpoint* nobody else collects what no manifest names, even where a higher
   claim exists: a drain there may be about to name it, and its checkpoint is the newest (``CollectsBelowTheHighest``).
5. *The path.* Checkpoints of older claims that stay (every thousandth, the best) must be those that the training came
   through. A drain that sleeps for days may write others, without their objects.
6. *Two trainings that claim in turn* can go on for ever. So each waits for a random time, and gives up after some
   tries.
"""

"""Tensors on a device on their way into the pool, while the device computes.

    boundary   (``sending.py``) a draft of the version; its tensors in groups (``groups.py``), a held job of the engine
               for each; what the next kernels will change is sent in their order; the device's work so far is marked
    pump       (a thread, ``pump.py``) group after group: its place is free -> sent after the mark -> arrived -> job
               started
    engine     copies the group from host memory into the slot, or sums up what the device put there itself

There are three transfer methods (``methods.py``). A user may choose one (``kinds.py``); ``choice.py`` chooses where the
user does not.

Invariants: a place is written only while no job reads from it, and its job reads only what has arrived; of a slot, only
after its header says that it holds no version. The gate is as ever: no update is even queued while a tensor that it
changes is under way. What fails on the way fails the version, which is then never committed.
"""

"""Transfer of tensors from a device into the pool, while the device goes on computing.

    boundary         (``sending.py``) reserves a slot; splits the tensors into groups (``groups.py``), each with a job
                     of the engine that waits until it is started; sends what the next kernels may change, in the
                     order of the computation (on its stream); marks the end of the device's work so far (by an event)
    transfer thread  (``transfer_thread.py``) for each group: waits until its host memory is free, sends the group
                     after the mark, waits until the group has arrived, starts the job of the group
    engine           copies the group from host memory into the slot, or computes the checksums of what the device wrote
                     into the slot

There are three transfer methods (``methods.py``). The user may name one (``kinds.py``); otherwise ``sending.py`` tries
them and keeps the best one. (It tries ``Device()`` only if a checkpoint may commit after the next update.)

Invariants: A device writes to host memory only while no job reads this memory, and a job reads only what has arrived. A
slot is written only after its header says that it holds no checkpoint. No update is even queued on the device while a
tensor that it changes is still being sent. A failed transfer fails its checkpoint, which then never commits.
"""

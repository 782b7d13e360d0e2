"""A state that others hand over, as tensors and bytes with names, becomes a checkpoint of a pool. There is no live
model and no session: the pool is open only while it is written."""

"""torchtitan's debug model, whose training goes on after a kill as if nothing had happened.

    pip install 'lightck[torchtitan]'
    torchrun --nproc-per-node 2 -m torchtitan.train --module titan_registry --config debug_with_pool

Run it in a checkout of torchtitan, which has the tokenizer and the text, with this folder in PYTHONPATH. Kill it, and
run it again. Two lines are lightck's: an import and the line marked with ``<-``.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from lightck.integrations.torchtitan import PoolCheckpointManager


def debug_with_pool() -> Trainer.Config:
    config = llama3_debugmodel()
    config.checkpoint = PoolCheckpointManager.Config(pool="pools")  # <-
    return config

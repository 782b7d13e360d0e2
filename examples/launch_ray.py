"""Start the two ranks of train_ranks.py with Ray Train. If a worker dies, Ray starts both again, and they go on.

    pip install 'lightck[launchers]'
    python examples/launch_ray.py              # kill -9 one of the workers, or pass --crash-at 20

The pools lie in a folder that all nodes share under the same path, or in a local folder of each node.
"""

from __future__ import annotations

from pathlib import Path

import train_ranks
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def main() -> None:
    args = train_ranks.command_line(__doc__).parse_args()
    pools = str(Path(args.pools).resolve())  # a worker has another working directory
    trainer = TorchTrainer(
        lambda: train_ranks.train(pools, args.epochs, args.crash_at),
        torch_config=TorchConfig(backend="gloo"),  # Ray makes the process group
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

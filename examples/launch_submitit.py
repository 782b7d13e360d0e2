"""Start the two ranks of train_ranks.py with submitit. If the job dies, it is submitted again, and goes on.

    pip install 'lightck[launchers]'
    python examples/launch_submitit.py --cluster local         # kill -9 one of the ranks, or pass --crash-at 20

On Slurm (--cluster slurm) a preempted job, and one whose time is over, are queued again by submitit itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import submitit
import torch.distributed as dist
import train_ranks

cloudpickle.register_pickle_by_value(train_ranks)  # the ranks need not find this file


class Training:
    """What each rank runs. submitit pickles it, and calls it again after a requeue."""

    def __init__(self, pools: str, epochs: int, crash_at: int) -> None:
        self.arguments = (pools, epochs, crash_at)

    def __call__(self) -> None:
        submitit.helpers.TorchDistributedEnvironment().export()
        dist.init_process_group("gloo")
        train_ranks.train(*self.arguments)
        dist.destroy_process_group()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called before a requeue. The pools hold every finished step, so there is nothing to save."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    parser = train_ranks.command_line(__doc__)
    parser.add_argument("--cluster", default="local", help="local or slurm (local)")
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder="jobs", cluster=args.cluster)
    executor.update_parameters(tasks_per_node=2, timeout_min=60)
    training = Training(str(Path(args.pools).resolve()), args.epochs, args.crash_at)
    for attempt in range(1, 5):
        job = executor.submit(training)
        print(f"attempt {attempt} is job {job.job_id}", flush=True)
        try:
            job.results()
            return
        except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as err:
            print(f"job {job.job_id} has failed: {str(err).splitlines()[0]}", flush=True)
    sys.exit("The job has failed four times.")


if __name__ == "__main__":
    main()

"""Loops in which an environment gives the data: pytorch/examples and CleanRL."""

from __future__ import annotations

from ..edits import after, at_end, before, sub
from . import program

EPISODES = 13
_STATE = (
    "class Environment:\n"
    "    def state_dict(self):\n"
    "        import json\n"
    "        return {'generator': json.dumps(env.unwrapped.np_random.bit_generator.state)}\n"
    "    def load_state_dict(self, state):\n"
    "        import json\n"
    "        env.unwrapped.np_random.bit_generator.state = json.loads(state['generator'])\n"
)

for _file, _model in (("reinforce", "policy"), ("actor_critic", "model")):
    _common = (sub(r"count\(1\)", f"range(1, {EPISODES})"), at_end(f"finished({_model}, [optimizer])"))
    _loop = (
        sub(rf"range\(1, {EPISODES}\)", f"range(session.step + 1, {EPISODES})"),
        at_end("session.close()"),
    )
    _attach = f'import lightck\nsession = lightck.attach({_model}, "run.pool", resume=True'
    _end = after(r"^        finish_episode\(\)", "session.end_step()")
    program(
        _file,
        "session.step",
        "pytorch/examples",
        f"reinforcement_learning/{_file}.py",
        common=_common,
        ours=(after("^optimizer = optim", _attach + ")"), *_loop),
    )
    program(
        f"{_file}, end_step",
        "session.step, end_step()",
        "pytorch/examples",
        f"reinforcement_learning/{_file}.py",
        common=_common,
        ours=(after("^optimizer = optim", _attach + ")"), *_loop, _end),
    )
    program(
        f"{_file}, environment in state",
        "session.step, end_step(), state={'environment': ...}",
        "pytorch/examples",
        f"reinforcement_learning/{_file}.py",
        common=_common,
        ours=(after("^optimizer = optim", _STATE + _attach + ", state={'environment': Environment()})"), *_loop, _end),
    )

_RUNS = (sub(r"run_name = f", "run_name = 'run'  # "),)

_DQN = (
    "--env-id CartPole-v1 --total-timesteps 200 --learning-starts 40 --train-frequency 8 --batch-size 16 "
    "--target-network-frequency 40 --buffer-size 150 --no-cuda"
)
_PROGRESS = (
    "class Progress:\n"
    "    done = 0\n"
    "    def state_dict(self): return {'done': self.done}\n"
    "    def load_state_dict(self, state): self.done = state['done']\n"
    "progress = Progress()\n"
    "import lightck\n"
)
_BUFFER = (
    "class Buffer:\n"
    "    names = ('observations', 'next_observations', 'actions', 'rewards', 'dones', 'timeouts')\n"
    "    def state_dict(self):\n"
    "        found = {name: getattr(rb, name, None) for name in self.names}\n"
    "        arrays = {name: torch.from_numpy(array) for name, array in found.items() if array is not None}\n"
    "        return {'arrays': arrays, 'pos': rb.pos, 'full': rb.full}\n"
    "    def load_state_dict(self, state):\n"
    "        for name, array in state['arrays'].items(): getattr(rb, name)[...] = array.numpy()\n"
    "        rb.pos, rb.full = state['pos'], state['full']\n"
)
_NETWORKS = "nn.ModuleList([q_network, target_network])"
for _name, _wiring, _before, _states in (
    ("cleanrl dqn", "attach(ModuleList([q, target])), counter in state", _PROGRESS, "{'progress': progress}"),
    (
        "cleanrl dqn, buffer in state",
        "as above, and the replay buffer in state",
        _PROGRESS + _BUFFER,
        "{'progress': progress, 'buffer': Buffer()}",
    ),
):
    program(
        _name,
        _wiring,
        "vwxyzjn/cleanrl",
        "cleanrl/dqn.py",
        _DQN,
        take=("cleanrl/dqn.py", "cleanrl_utils"),
        folder="",
        common=(*_RUNS, before(r"^    if args\.save_model:", f"finished({_NETWORKS}, [optimizer])")),
        ours=(
            before(
                r"^    start_time = time",
                _before + f'session = lightck.attach({_NETWORKS}, "run.pool", '
                f"resume=True, optimizer=optimizer, state={_states})",
            ),
            sub(r"range\(args\.total_timesteps\)", "range(progress.done, args.total_timesteps)"),
            before("^        # ALGO LOGIC: put action logic", "progress.done = global_step"),
            before(r"^    if args\.save_model:", "session.close()"),
        ),
        paths=(".",),
    )

program(
    "cleanrl ppo",
    "session.step; the environment not in state",
    "vwxyzjn/cleanrl",
    "cleanrl/ppo.py",
    "--env-id CartPole-v1 --total-timesteps 128 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 "
    "--no-cuda",
    take=("cleanrl/ppo.py", "cleanrl_utils"),
    paths=(".",),
    common=(*_RUNS, before(r"^    envs\.close\(\)", "finished(agent, [optimizer])")),
    ours=(
        after(r"^    optimizer = optim", 'import lightck\nsession = lightck.attach(agent, "run.pool", resume=True)'),
        sub(
            r"range\(1, args\.num_iterations \+ 1\)",
            "range(session.step // (args.update_epochs * args.num_minibatches) + 1, args.num_iterations + 1)",
        ),
        before(r"^    envs\.close\(\)", "session.close()"),
    ),
)

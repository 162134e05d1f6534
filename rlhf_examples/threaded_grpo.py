"""GRPO whose rewards are computed in a thread while the next rollout decodes.

Sums with the SFT model of `make demo`, on CPUs; a model of 7B on 8 GPUs, with a slow reward server:
torchrun --nproc_per_node=2 -m rlhf_examples.threaded_grpo --num_rollouts 4 \\
    --actor_model_name_or_path runs/demo/sums/model --reward rlhf_examples.rewards:exact_match --num_iterations 3
torchrun --nproc_per_node=8 -m rlhf_examples.threaded_grpo --num_rollouts 4 --dtype bfloat16 \\
    --actor_model_name_or_path my-model --data_path problems.jsonl --reward http://rewards:8765/tests

An iteration has several rollouts by the same weights. Each one's completions go to the thread at once; the updates
follow when all have been scored. So the metrics are those of a run that waits for every reward. Decoding leaves the
interpreter to the thread: the kernels run outside of Python's lock.
"""

from rlhf_examples.common.arguments import ThreadedGRPOArguments
from rlhf_examples.common.command_line import command

main = command("rlhf_examples.threaded_grpo", ThreadedGRPOArguments)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds: help and errors come first

import json
import time

from rlhf_examples.common.daemon_threads import DaemonThreads
from rlhf_examples.common.models import is_reward_model
from rlhf_examples.common.ranks import is_main_process
from rlhf_examples.learner import Learner, means


def run(args: ThreadedGRPOArguments) -> list[dict[str, float]]:
    """Train and export a policy; rank 0 prints each iteration's metrics as JSON. Returns them."""
    for reward in filter(is_reward_model, args.reward):
        raise ValueError(
            f"reward: {reward!r} given, a model, whose ranks compute in step, as the policy's do; give functions or "
            "addresses of servers, or run rlhf_examples.grpo"
        )
    learner, history = Learner(args, args.num_rollouts), []
    with DaemonThreads(1) as worker:
        for iteration in range(args.num_iterations):
            history.append(train_iteration(learner, worker, iteration, args))
            if is_main_process():
                print(json.dumps({"iteration": iteration, **history[-1]}), flush=True)
    learner.export()
    learner.destroy()
    return history


def train_iteration(
    learner: Learner, worker: DaemonThreads, iteration: int, args: ThreadedGRPOArguments
) -> dict[str, float]:
    """Rollouts, their rewards, and the updates; returns the means of their metrics, and seconds."""
    start, rollouts, rewards = time.perf_counter(), [], []
    for number in range(args.num_rollouts):
        rollouts.append(learner.roll_out(iteration, number))
        rewards.append(worker.submit(learner.score, rollouts[-1]))
        if not args.threaded:
            rewards[-1].result()
    scores = [reward.result() for reward in rewards]  # raises what a reward has raised
    scored = time.perf_counter()
    rows = [learner.update(*scored_rollout, iteration) for scored_rollout in zip(rollouts, scores, strict=True)]
    times = {"time/rollouts_and_rewards": scored - start, "time/update": time.perf_counter() - scored}
    return {**means(rows), **times}

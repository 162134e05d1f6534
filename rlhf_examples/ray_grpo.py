"""GRPO in Ray actors that hold a rank each; policy, reference and reward model take turns on the device.

`pip install ".[ray]"` in the checkout. The models of `make demo` on two CPU actors; a model of 7B on 8 GPUs:
python -m rlhf_examples.ray_grpo --num_ranks 2 --actor_model_name_or_path runs/demo/sft/model \\
    --data_path synthetic:stories --reward runs/demo/reward_model/model --num_iterations 3
python -m rlhf_examples.ray_grpo --num_ranks 8 --actor_model_name_or_path my-model --data_path problems.jsonl \\
    --reward my-reward-model --dtype bfloat16

The driver, which has no model, puts an iteration together from the actors' methods. Between them the engines sleep:
what the policy holds, its optimizer states included, is in host memory while the reward model scores.
"""

import importlib

from rlhf_examples.common.arguments import RayGRPOArguments
from rlhf_examples.common.command_line import checked_arguments
from rlhf_examples.common.input_errors import end_startup, input_errors_reported


def main() -> None:
    """Train with the arguments of the command line, and print each iteration's metrics as JSON."""
    with input_errors_reported():
        args = checked_arguments(RayGRPOArguments)
        importlib.import_module("rlhf_examples.ray_grpo").run(args)


if __name__ == "__main__":
    main()  # before the imports below, which take seconds: help and wrong settings are answered first
    raise SystemExit

import json
import os
import socket
from typing import Any

from torch import Tensor

from rlhf_examples.common.ranks import end_ranks, start_ranks
from rlhf_examples.learner import Learner, Rollout, require_supported


class RankActor:
    """A rank of the run, as a Ray actor. The driver calls each method on all ranks, in the same order."""

    def __init__(self, args: RayGRPOArguments, rank: int):
        self.args, self.rank = args, rank
        self.learner: Learner  # made by `start`
        self.rollout: Rollout  # the latest one; it stays on its rank
        self.scores: Tensor

    def address(self) -> tuple[str, int]:
        """This machine's address and a free port of it, for rank 0 to be found."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return socket.gethostbyname(socket.gethostname()), probe.getsockname()[1]

    def start(self, host: str, port: int) -> None:
        """Join the other ranks and load the models. Ray shows an actor its own GPU alone, so its local rank is 0."""
        ranks = {"RANK": self.rank, "LOCAL_RANK": 0, "WORLD_SIZE": self.args.num_ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR=host)
        start_ranks()
        self.learner = Learner(self.args, sleeps=self.args.sleeps)

    def roll_out(self, iteration: int) -> None:
        """Completions of the next prompts."""
        self.rollout = self.learner.roll_out(iteration)

    def score(self) -> None:
        """Rewards of these completions."""
        self.scores = self.learner.score(self.rollout)

    def update(self, iteration: int) -> dict[str, float]:
        """Learn from them; returns metrics of all ranks."""
        return self.learner.update(self.rollout, self.scores, iteration)

    def finish(self) -> None:
        """Write the policy, and free everything."""
        self.learner.export()
        self.learner.destroy()
        end_ranks()


def run(args: RayGRPOArguments) -> list[dict[str, float]]:
    """Start the actors, train and export a policy; returns the metrics of each iteration."""
    import ray  # needs the extra `ray`

    require_supported(args)
    ray.init(ignore_reinit_error=True)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < gpus < args.num_ranks:
        raise ValueError(f"num_ranks: {args.num_ranks} given, and the cluster has {gpus} GPUs; give at most as many")
    end_startup()
    actor_class: Any = ray.remote(num_cpus=1, num_gpus=int(gpus > 0))(RankActor)
    ranks = [actor_class.remote(args, rank) for rank in range(args.num_ranks)]
    host, port = ray.get(ranks[0].address.remote())
    on_all(ranks, "start", host, port)
    history = []
    for iteration in range(args.num_iterations):
        on_all(ranks, "roll_out", iteration)
        on_all(ranks, "score")
        metrics, *_ = on_all(ranks, "update", iteration)
        print(json.dumps({"iteration": iteration, **metrics}), flush=True)
        history.append(metrics)
    on_all(ranks, "finish")
    ray.shutdown()
    return history


def on_all(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    """The results of a method of every actor, by rank. Raises the first error of any: the other ranks may be waiting
    for the one that failed."""
    import ray  # needs the extra `ray`

    results = [getattr(rank, method).remote(*args) for rank in ranks]
    waiting = list(results)
    while waiting:
        done, waiting = ray.wait(waiting)
        ray.get(done)
    return ray.get(results)

"""OpenRLHF 0.11 with one engine for policy and rollouts: `python -m hybrid.compat.openrlhf` takes the arguments of
`python -m openrlhf.cli.train_ppo_ray`, and builds no vLLM engines.

Its policy actors train a HybridEngine, and serve the requests of its samples generator from the same weights
(`engine.serve`): nothing is broadcast, and vLLM need not be installed. Rewards, advantages, losses and agent executors
are OpenRLHF's.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import runpy
import sys
import types
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid.compat.install import install as install_engine
from hybrid.runtime.background_loop import BACKGROUND
from hybrid.sampling.params import MAX_COUNT, SamplingParams
from hybrid.serving.server import Completion, Server

CLI = "openrlhf.cli.train_ppo_ray"
MAX_PROMPTS = 256  # whose agents run at once on a rank; each has a thread
SETTINGS = "HYBRID_OPENRLHF_SETTINGS"  # an environment variable: the block hybrid_engine, as JSON, in Ray's workers

# Fields of vLLM's SamplingParams that have no counterpart, and their values that ask for nothing.
OFF: dict[str, tuple] = {
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "stop": (None, [], ()),
    "ignore_eos": (False,),
    "prompt_logprobs": (None,),
    "bad_words": (None, [], ()),
    "logit_bias": (None, {}),
    "structured_outputs": (None,),
}


@dataclass
class RequestedSampling:
    """vLLM's SamplingParams, for processes without vLLM: the fields that OpenRLHF sets, and those of agents."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True


class Logprob(NamedTuple):
    """A token's logprob, as vLLM returns it."""

    logprob: float


@dataclass
class CompletionOutput:
    """vLLM's output of a request's sample, as far as agent executors read it.

    logprobs: for each token, its id with its logprob under the distribution that it was drawn from, vLLM's
        "processed_logprobs"; None if the request asks for none.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    """vLLM's output of a request."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def engine_params(requested: Any, end_token_id: int | None) -> SamplingParams:
    """Return the settings that a vLLM SamplingParams asks for.

    Args:
        requested: vLLM's SamplingParams, or RequestedSampling.
        end_token_id: of the tokenizer; it ends a completion too.

    Raises:
        NotImplementedError: for a field without a counterpart that is set.
    """
    for name, neutral in OFF.items():
        if (value := getattr(requested, name, neutral[0])) not in neutral:
            raise NotImplementedError(f"SamplingParams.{name}: {value!r} given, which is not supported; leave it out")
    if requested.max_tokens is None:
        raise ValueError("SamplingParams.max_tokens: None given; set the tokens of a completion")
    return SamplingParams(
        max_new_tokens=requested.max_tokens,
        temperature=requested.temperature,
        top_p=requested.top_p,
        top_k=max(requested.top_k, 0),
        min_p=requested.min_p,
        min_new_tokens=min(requested.min_tokens, requested.max_tokens),
        repetition_penalty=requested.repetition_penalty,
        seed=requested.seed,
        stop_token_ids=(*(requested.stop_token_ids or ()), *([] if end_token_id is None else [end_token_id])),
    )


@dataclass
class ServedLLM:
    """OpenRLHF's `llm_engine` of an agent executor, on a server of the policy's engine."""

    server: Server
    tokenizer: Any

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Return the completion of a prompt.

        Args:
            prompt_token_ids: of the whole conversation so far; what an earlier request computed is not run again.
            sampling_params: vLLM's SamplingParams, or RequestedSampling.
            multi_modal_data: must be empty.

        Raises:
            NotImplementedError: for images, and for settings without a counterpart.
        """
        if multi_modal_data:
            raise NotImplementedError("multi_modal_data: images are not served; train on text, or with OpenRLHF's vLLM")
        params = engine_params(sampling_params, self.tokenizer.eos_token_id)
        (completion,) = await self.server.generate(prompt_token_ids, params)
        output = self._output(completion, sampling_params)
        return RequestOutput(list(prompt_token_ids), [output])

    def _output(self, completion: Completion, requested: Any) -> CompletionOutput:
        ids = list(completion.token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=requested.skip_special_tokens)
        logps = None
        if requested.logprobs is not None:
            logps = [{token: Logprob(float(logp))} for token, logp in zip(ids, completion.logps, strict=True)]
        return CompletionOutput(ids, text, completion.finish_reason, logps)


@dataclass
class PolicyServer:
    """Serves the requests of a policy actor's rollouts from the engine that it trains.

    executor: OpenRLHF's, runs an agent, or one turn and its reward function.
    """

    engine: Any
    executor: Any
    server: Server | None = None

    def begin(self) -> None:
        """Begin to serve. Every rank must call it: parameters are gathered."""
        self.engine.eval()
        self.server = self.engine.serve(max_queue=MAX_COUNT)  # agents send all their requests at once
        self.server.__enter__()

    def end(self) -> None:
        """End the server, and go back to training's weights."""
        server, self.server = self.server, None
        if server is not None:
            server.__exit__(None, None, None)
        self.engine.train()

    def responses(self, tokenizer: Any, num_samples: int, **arguments: Any) -> list[dict[str, Any]]:
        """Run the executor on a prompt `num_samples` times at once, and return its answers. For any thread.

        arguments: of the executor's `execute`.
        """
        if self.server is None:
            raise RuntimeError("generate_responses: no rollout has begun; SamplesGenerator begins and ends it")
        llm = ServedLLM(self.server, tokenizer)

        async def execute() -> list[dict[str, Any]]:
            samples = range(num_samples)
            runs = (self.executor.execute(**arguments, hf_tokenizer=tokenizer, llm_engine=llm) for _ in samples)
            return await asyncio.gather(*runs)

        return BACKGROUND.run(execute())

    def num_unfinished(self) -> int:
        """Return the samples that are decoded or wait."""
        stats = None if self.server is None else self.server.stats()
        return 0 if stats is None else stats.running + stats.waiting


def serving_policy(actor_class: Any) -> Any:
    """Return OpenRLHF's Ray actor of the policy, which serves its own rollouts.

    Its methods of the rollout run in threads of their own, so that requests come while others are decoded; all others,
    which are collectives, in one thread.

    actor_class: OpenRLHF's PolicyModelActor.
    """
    import ray

    base: Any = actor_class.__ray_metadata__.modified_class

    class PolicyModelActor(base):
        def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
            block = {"enabled": True, "max_out_tokens": strategy.args.data.max_len, **settings_of_process()}
            original = strategy.get_ds_train_config
            strategy.get_ds_train_config = lambda *a, **k: {**original(*a, **k), "hybrid_engine": block}
            super().init_model_from_pretrained(strategy, *args, **kwargs)
            self.rollouts = PolicyServer(self.actor.model, executor_of(strategy.args))

        def begin_rollout(self) -> None:
            self.rollouts.begin()

        def end_rollout(self) -> None:
            self.rollouts.end()

        @ray.method(concurrency_group="rollout")
        def generate_responses(
            self,
            prompt: str,
            label: str,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            num_samples: int = 1,
            images: Any = None,
        ) -> list[dict[str, Any]]:
            arguments = {"prompt": prompt, "label": label, "images": images, "max_length": max_length}
            return self.rollouts.responses(hf_tokenizer, num_samples, sampling_params=sampling_params, **arguments)

        @ray.method(concurrency_group="rollout")
        def get_num_unfinished_requests(self) -> int:
            return self.rollouts.num_unfinished()

        def wake_up(self, tags: Any = None) -> None:
            """Do nothing: the weights are training's."""

        def sleep(self, level: int = 1) -> None:
            """Do nothing: outside a rollout the engine holds no copy."""

        def broadcast_to_vllm(self) -> None:
            """Do nothing: rollouts read the weights that were trained."""

    remote: Any = ray.remote  # its types (2.60) do not have `concurrency_groups`
    return remote(num_gpus=1, concurrency_groups={"rollout": MAX_PROMPTS})(PolicyModelActor)


def settings_of_process() -> dict[str, Any]:
    """Return the block `hybrid_engine` that `main` was given."""
    return json.loads(os.environ.get(SETTINGS, "{}"))


def executor_of(args: Any) -> Any:
    """Return the agent executor that OpenRLHF's arguments name."""
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    if path := args.train.agent_func_path:
        return _load_agent_executor(path)
    return SingleTurnAgentExecutor(args.reward.remote_url)


def provide_vllm() -> None:
    """Make `import vllm` work in this process where vLLM is not installed: the names that OpenRLHF imports."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        parts: dict[str, dict[str, Any]] = {
            "vllm": {"SamplingParams": RequestedSampling, "__version__": "0.29.0"},
            "vllm.inputs": {"TokensPrompt": dict},
            "vllm.utils": {"random_uuid": lambda: uuid.uuid4().hex},
        }
        for name, contents in parts.items():
            module = types.ModuleType(name)
            vars(module).update(contents)
            sys.modules[name] = module


@contextmanager
def rollout_of(policies: Sequence[Any]) -> Iterator[None]:
    """Inside the block the policy actors serve."""
    import ray

    ray.get([policy.begin_rollout.remote() for policy in policies])
    try:
        yield
    finally:
        ray.get([policy.end_rollout.remote() for policy in policies])


def install() -> None:
    """Patch OpenRLHF in this process: its trainer takes samples from its policy actors. Ray's workers call it as they
    start."""
    provide_vllm()
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    if getattr(BasePPOTrainer, "takes_samples_from_policy", False):
        return
    install_engine(inference=False)
    init, generate = BasePPOTrainer.__init__, SamplesGenerator._generate_vllm

    def with_policies(self: Any, strategy: Any, actor_model_group: Any, *args: Any, **kwargs: Any) -> None:
        init(self, strategy, actor_model_group, *args, **kwargs)
        self.samples_generator.vllm_engines = actor_model_group._actor_handlers

    def in_rollout(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rollout_of(self.vllm_engines):
            return generate(self, *args, **kwargs)

    BasePPOTrainer.__init__, SamplesGenerator._generate_vllm = with_policies, in_rollout
    BasePPOTrainer.takes_samples_from_policy = True


def main(argv: Sequence[str] | None = None) -> None:
    """Run OpenRLHF's PPO command line with `hybrid` as policy and rollout engine.

    argv: OpenRLHF's arguments, and `--hybrid_engine JSON`; None: the command line's.
    """
    parser = argparse.ArgumentParser(prog="python -m hybrid.compat.openrlhf", description=__doc__, add_help=False)
    parser.add_argument("--hybrid_engine", type=json.loads, default={}, help="keys of the block hybrid_engine, as JSON")
    parser.add_argument("--train.async_enable", dest="is_async", action="store_true")
    ours, rest = parser.parse_known_args(argv)
    if ours.is_async:
        parser.error(
            "--train.async_enable: rollouts read the weights that are trained, so they cannot overlap; leave it out"
        )
    if missing := [name for name in ("openrlhf", "ray") if importlib.util.find_spec(name) is None]:
        parser.error(f"{' and '.join(missing)} not installed: this is OpenRLHF 0.11's trainer; pip install openrlhf")
    install()
    import openrlhf.trainer.ray
    import openrlhf.trainer.ray.ppo_actor as actors
    import ray

    actors.PolicyModelActor = serving_policy(actors.PolicyModelActor)

    def no_engines(*args: Any, **kwargs: Any) -> None:
        """Build no vLLM engine."""

    openrlhf.trainer.ray.create_vllm_engines = no_engines
    if not ray.is_initialized():
        variables = {"TOKENIZERS_PARALLELISM": "true", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
        variables = {name: os.environ.get(name, value) for name, value in variables.items()}
        variables[SETTINGS] = json.dumps(ours.hybrid_engine)
        ray.init(runtime_env={"env_vars": variables, "worker_process_setup_hook": f"{__name__}.install"})
    sys.argv = [CLI, *rest]
    runpy.run_module(CLI, run_name="__main__")


if __name__ == "__main__":
    from hybrid.compat import openrlhf

    openrlhf.main()

"""A step of TRL's GRPOTrainer under ZeRO-3: with TRL's own generation, and with this engine.

    torchrun --nproc_per_node=2 -m benchmarks.trl_step --shape 10M --rounds 5

Contenders train from the same weights on the same prompts and alternate in one process group: a round is a short
training of each with TRL's defaults (gradient checkpointing is on). Needs TRL 1.16 (`pip install trl`). All completions
have the maximum length. The coverage of this engine's rollouts is printed below the table. `--output` writes every
time to a JSON file, from which `benchmarks.page` draws the README's picture.
"""

import argparse
import contextlib
import copy
import io
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hybrid
from benchmarks import results, tables
from benchmarks.cases import SHAPES, make_model
from benchmarks.machine import hardware
from benchmarks.ranks import now, start_ranks
from hybrid.compat.trl import rollout_func

END = 2


@dataclass
class Contender:
    """A way to train.  ours: with this engine.  gathers: TRL gathers all weights around `generate`.

    rollouts: through `rollout_func`.  forward: `install`'s `training_forward`.  coverage: of this engine.
    """

    ours: bool
    gathers: bool
    rollouts: bool = False
    forward: str | None = None
    coverage: str = ""
    step_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)


def main() -> None:
    """Measure and print the table."""
    args = parse()
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental in TRL
    start_ranks()
    about = results.begin("trl_step", args)
    contenders = {
        "TRL's default: gather all, Hugging Face": Contender(ours=False, gathers=True),
        "hybrid.install()": Contender(ours=True, gathers=False),
        "hybrid.install(), TRL gathers all the same": Contender(ours=True, gathers=True),
        "rollout_func": Contender(ours=True, gathers=False, rollouts=True),
        'hybrid.install(training_forward="packed")': Contender(ours=True, gathers=False, forward="packed"),
        'hybrid.install(training_forward="exact")': Contender(ours=True, gathers=False, forward="exact"),
    }
    contenders = {
        name: contender for name, contender in contenders.items() if not args.contenders or name in args.contenders
    }
    model = make_model(args.shape, args.dtype, get_accelerator().current_device_name())
    for _ in range(args.rounds):
        for contender in contenders.values():
            train(contender, copy.deepcopy(model), args)
    if dist.get_rank() == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        title = (
            f"{size / 1e6:.0f}M parameters, {args.dtype}, {dist.get_world_size()} ranks on {hardware()}; "
            f"{args.sequences} sequences per rank in groups of {args.num_generations}, {args.prompt_len} + "
            f"{args.new_tokens} tokens; {args.rounds} round{'s' * (args.rounds != 1)} of {args.steps} steps each, "
            "contenders alternating"
        )
        ways = {name: asdict(contender) for name, contender in contenders.items()}
        result = {**about, "title": title, "contenders": ways}
        print(*tables.trl_step(result), sep="\n")
        for name, way in ways.items():
            if way["ours"]:
                print(f"coverage of {name}: {way['coverage']}")
        results.write(args.output, result)
    dist.barrier()
    dist.destroy_process_group()


def train(contender: Contender, model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Run a short training; its first step is not counted."""
    import trl  # an optional package

    for state in (AcceleratorState, GradientState):  # each trainer sets its own configuration
        state._reset_state(*[True] * (state is AcceleratorState))
    unset_hf_deepspeed_config()
    times = StepTimes()
    patched = hybrid.installed(training_forward=contender.forward)
    with tempfile.TemporaryDirectory() as folder, patched, contextlib.redirect_stdout(io.StringIO()):
        vocabulary = SHAPES[args.shape]["vocab"]
        options = {"rollout_func": rollout_func} if contender.rollouts else {}
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(
                folder,
                deepspeed=configuration(contender.ours, args),
                use_cpu=not torch.cuda.is_available(),
                bf16=args.dtype == "bf16",
                max_steps=args.steps + 1,
                per_device_train_batch_size=args.sequences,
                num_generations=args.num_generations,
                max_completion_length=args.new_tokens,
                generation_kwargs={"min_new_tokens": args.new_tokens},
                ds3_gather_for_generation=contender.gathers,
                learning_rate=1e-6,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts(vocabulary, args.prompt_len)}),
            processing_class=tokenizer(vocabulary),
            callbacks=[times],
            **options,
        )
        times.around(trainer)
        trainer.train()
        if contender.ours:
            contender.coverage = coverage_of(trainer.model_wrapped)
        trainer.model_wrapped.destroy()
    contender.step_s += times.step_s[1:]
    contender.generate_s += times.generate_s[1:]


def coverage_of(engine: hybrid.HybridEngine) -> str:
    """The containers of an engine's parts, and the reason of its latest native request."""
    containers = sorted({row["container"] for row in engine.coverage()})
    return ", ".join([*containers, *filter(None, [engine.stats()["fallback_reason"]])])


class StepTimes(transformers.TrainerCallback):
    """Times each step and its generation, until the last rank is done."""

    def __init__(self):
        self.step_s: list[float] = []
        self.generate_s: list[float] = []

    def around(self, trainer) -> None:
        """Time the trainer's generation."""
        generate = trainer._generate

        def timed(*args, **kwargs):
            start = now()
            output = generate(*args, **kwargs)
            self.generate_s.append(now() - start)
            return output

        trainer._generate = timed

    def on_step_begin(self, *args, **kwargs):
        self.start = now()

    def on_step_end(self, *args, **kwargs):
        self.step_s.append(now() - self.start)


def configuration(ours: bool, args: argparse.Namespace) -> dict:
    """DeepSpeed's configuration: everything is partitioned, as for a model too large to be kept whole."""
    return {
        "train_micro_batch_size_per_gpu": args.sequences,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": args.dtype == "bf16"},
        "hybrid_engine": {"enabled": ours, "max_out_tokens": args.prompt_len + args.new_tokens},
    }


def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """A made-up reward that differs between completions."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def prompts(vocabulary: int, length: int) -> list[str]:
    """Prompts of random words."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, vocabulary, (256, length), generator=generator)
    return [" ".join(f"w{word}" for word in row) for row in rows.tolist()]


def tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with a word for each token."""
    word_ids = {"<pad>": 0, "<s>": 1, "</s>": END, **{f"w{index}": index for index in range(3, vocabulary)}}
    tokenizer_model = Tokenizer(models.WordLevel(word_ids, unk_token="<pad>"))
    tokenizer_model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def parse() -> argparse.Namespace:
    """The flags."""
    parser = results.parser(__doc__, num_generations=4, prompt_len=32, new_tokens=64, rounds=3)
    parser.add_argument("--shape", choices=SHAPES, default="10M")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--sequences", type=int, default=16, help="completions per rank and step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round")
    parser.add_argument("--contenders", nargs="*", help="names in the table; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()

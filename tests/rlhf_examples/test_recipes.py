"""The recipes in configs/: their memory figures match `memory_plan`, and each runs with tiny models."""

import json
import re
import shlex
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
import yaml
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)
from typer.testing import CliRunner

from hybrid.__main__ import app
from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.training.builder import Builder
from hybrid.training.memory_plan import MemoryPlanner
from rlhf_examples import pipeline
from rlhf_examples.common.actor import rollout_config
from rlhf_examples.common.arguments import PPOArguments
from rlhf_examples.common.parsing import read_yaml
from rlhf_examples.common.steps import arguments_of_step, parse
from tests.marks import slow_but
from tests.rlhf_examples.chat_models import chat_model, tokenizer_of
from tests.rlhf_examples.scripts import ROLLOUTS, iterations_of
from tests.test_launchers import run_together

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, README = ROOT / "configs", ROOT / "README.md"
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
QWEN = {"tie_word_embeddings": True, "vocab_size": 151936, "max_position_embeddings": 8192}
# Recipe → ranks, sequences per rank, tokens per sequence, and the model sizes of its figures.
RECIPES = {
    "1gpu_1b": (1, 32, 768, "qwen2", (1536, 8960, 28, 12), {**QWEN, "num_key_value_heads": 2}),
    "8gpu_7b_lora": (8, 32, 1024, "llama", (4096, 14336, 32, 32), LLAMA),
    "8gpu_7b_full": (8, 32, 1024, "llama", (4096, 14336, 32, 32), LLAMA),
    "8gpu_13b": (8, 32, 1024, "llama", (5120, 13824, 40, 40), {"vocab_size": 32000}),
    "16gpu_70b_lora": (16, 16, 1024, "llama", (8192, 28672, 80, 64), LLAMA),
}
FIRST_RATIO = 0.2  # in bfloat16 it is 0.01; with dropout 6 to 28
SIZE_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.fixture
def fake_process_group():
    """A fake process group with a recipe's number of ranks, of which only this one exists."""

    def begin(world_size: int) -> None:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())

    yield begin
    dist.destroy_process_group()


def partitioned_model(args: PPOArguments, world_size: int, kind: str, sizes: tuple, more: dict):
    """A policy whose parameters have ZeRO-3's attributes, without memory."""
    config = AutoConfig.for_model(kind, **dict(zip(SIZE_NAMES, sizes, strict=True)), **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if args.actor_lora_dim:
            lora = peft.LoraConfig(r=args.actor_lora_dim, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora, low_cpu_mem_usage=True).to(torch.bfloat16)
    inner = (model.get_base_model() if args.actor_lora_dim else model).model
    inner.rotary_emb = type(inner.rotary_emb)(config)  # its tables are read
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
        parameter.ds_process_group, parameter.ds_status = dist.group.WORLD, ZeroParamStatus.NOT_AVAILABLE
        parameter.ds_tensor = torch.empty(-(-parameter.numel() // world_size), dtype=parameter.dtype, device="meta")
        parameter.ds_tensor.ds_numel, parameter.ds_tensor.final_location = parameter.ds_tensor.numel(), None
        parameter.data = torch.empty(0, dtype=parameter.dtype, device="meta")
    return model


def ppo_of(name: str) -> PPOArguments:
    return arguments_of_step("ppo", parse(read_yaml(CONFIGS / f"{name}.yaml"), []))


@pytest.mark.parametrize("name", slow_but([name for name in RECIPES if name != "16gpu_70b_lora"], RECIPES))
def test_memory_figures_of_recipes_match_the_plan(name, fake_process_group):
    world_size, rows, tokens, *of_model = RECIPES[name]
    args = ppo_of(name)
    assert args.per_device_generation_batch_size == rows
    assert args.max_prompt_seq_len + args.max_answer_seq_len == tokens
    fake_process_group(world_size)
    model = partitioned_model(args, world_size, *of_model)
    blocks = rollout_config(args)
    settings = HybridEngineConfig(**blocks["hybrid_engine"])
    builder = Builder(model, settings, RolloutConfig(**blocks["rollout"]), 3, None, lambda nbytes: None, list)
    plan = MemoryPlanner(builder).plan(rows, tokens)
    expected = {line.split("  in use")[0].strip() for line in re.sub(" +", " ", str(plan)).splitlines()[1:]}
    expected = {line.removesuffix(" in use") for line in expected}
    figures = [
        line for line in (CONFIGS / f"{name}.yaml").read_text().splitlines() if re.search(r"\d\.\d +\d+\.\d", line)
    ]
    figures = {re.sub(" +", " ", line.removeprefix("#")).strip() for line in figures}
    assert len(figures) >= 2
    assert figures <= expected, figures - expected
    assert any(line.startswith(str(plan.in_use)) for line in figures), "the recipe lacks the figures of its own mode"


def meta_bytes(kind: type, sizes: tuple, **more) -> tuple[int, int, int]:
    """Bytes in bfloat16 of a Llama, of one of its layers, and of the largest matrix in a layer."""
    config = AutoConfig.for_model("llama", **dict(zip(SIZE_NAMES, sizes, strict=True)), **LLAMA, **more)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    layer = [parameter.nbytes for parameter in model.model.layers[0].parameters()]
    return sum(parameter.nbytes for parameter in model.parameters()), sum(layer), max(layer)


def test_host_memory_figures_of_the_70b_recipe():
    """From the memory of loading and saving, measured in `test_loading.py`: under ZeRO-3 mapped files on the first rank
    and a module's weights on the device; otherwise a full model in the engine's dtype per rank; saving, a file and a
    layer."""
    settings = read_yaml(CONFIGS / "16gpu_70b_lora.yaml")
    assert settings["common"]["dtype"] == "bfloat16"
    assert not settings["common"].get("offload")
    args, ranks, nodes = ppo_of("16gpu_70b_lora"), 8, 2
    assert args.actor_zero_stage == args.critic_zero_stage == 3
    assert not args.offload_reference_model
    policy, layer, matrix = meta_bytes(AutoModelForCausalLM, RECIPES["16gpu_70b_lora"][4])
    value, *_ = meta_bytes(AutoModelForSequenceClassification, RECIPES["8gpu_7b_lora"][4], num_labels=1)
    saving = 5 * 10**9 + layer + 2 * (2 * matrix)  # a matrix in float32, and its sum with the LoRA delta
    figures = {
        f"policy {policy / 1e9:.1f}, critic {value / 1e9:.1f}:",
        f"on every rank was {2 * policy * ranks / 1e9:.1f}.",
        f"reward model {(ranks + 1) * value / 1e9:.1f}:",
        f"(offload_reference_model: true) {(1 + 1 / nodes) * value / 1e9:.1f}.",
        f"written: {saving / 1e9:.1f} on the first rank",
    }
    text = (CONFIGS / "16gpu_70b_lora.yaml").read_text()
    assert not [line for line in figures if line not in text], figures


def conversation(*texts: str) -> list[dict]:
    """Alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def rows(make, count: int = 24) -> list[dict]:
    """`count` rows of `make`, each of a different number."""
    return [make(f"{number} red") for number in range(count)]


POST = "SUBREDDIT: r/x\n\nTITLE: {0}\n\nPOST: {0}\n\nTL;DR:"
DIALOGUE = "\n\nHuman: What is {0}?\n\nAssistant: It is {0}.\n\nHuman: And?\n\nAssistant:"
HH = [
    {"chosen": f"{DIALOGUE.format(x)} A ball.", "rejected": f"{DIALOGUE.format(x)} A boat."}
    for x in map(str, range(24))
]
ULTRA = rows(
    lambda x: {
        "prompt": f"What is {x}?",
        "prompt_id": x,
        "chosen": conversation(f"What is {x}?", "A ball."),
        "rejected": conversation(f"What is {x}?", "A boat."),
        "messages": conversation(f"What is {x}?", "A ball."),
        "score_chosen": 8.0,
        "score_rejected": 7.0,
    }
)
# Data set of a recipe → rows with the same columns.
DATA = {
    "my-conversations.jsonl": rows(lambda x: {"messages": conversation(f"What is {x}?", "A ball.", "Well?", "No.")}),
    "my-pairs.jsonl": rows(
        lambda x: {"chosen": conversation(f"What is {x}?", "A ball."), "rejected": conversation(f"What is {x}?", "No.")}
    ),
    "my-prompts.jsonl": rows(lambda x: {"prompt": conversation(f"What is {x}?", "A ball.", "Well?")}),
    "Anthropic/hh-rlhf": HH,
    "openai/gsm8k": rows(lambda x: {"question": f"How many are {x}?", "answer": f"{x} are 1,000.\n#### 1,000"}),
    "HuggingFaceH4/ultrafeedback_binarized": ULTRA,
    "trl-lib/tldr": rows(lambda x: {"prompt": POST.format(x), "completion": " A ball."}),
    "trl-lib/tldr-preference": rows(lambda x: {"prompt": POST.format(x), "chosen": " A ball.", "rejected": " A boat."}),
    "my-problems.jsonl": rows(lambda x: {"prompt": conversation(f"What is {x}?"), "answer": "1"}),
    "my-programs.jsonl": rows(lambda x: {"prompt": conversation(f"Write {x}."), "tests": "assert True"}),
}
# By model: what a tiny run of the recipe shows is its settings, not its model.
OF_MODELS = ("qwen3_gsm8k", "qwen3_5_lora", "gpt_oss_20b_lora", "8gpu_qwen3_8b_full")
OF_SETS = ("hh_rlhf", "gsm8k", "ultrafeedback", "tldr")


def tiny_recipe(name: str, model: str, folder: Path) -> dict:
    """A recipe's settings with small sizes: `model`, one iteration, and rows with its sets' columns."""
    settings = read_yaml(CONFIGS / f"{name}.yaml")

    def file_of(path: str) -> str:
        base = re.split("[:@]", path)[0]
        file = folder / f"{base.replace('/', '_').removesuffix('.jsonl')}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in DATA[base]))
        return str(file)

    settings["common"] |= {"report_to": [], "save_every": 1, "eval_rows": 4, "data_output_path": str(folder / "cache")}
    for own in (settings["common"], *settings["steps"].values()):
        own |= {key: [*map(file_of, own[key])] for key in ("data_path", "eval_data_path") if key in own}
    for step, own in settings["steps"].items():
        for key in ("model_name_or_path", "actor_model_name_or_path"):
            if key in own and not own[key].startswith("step:"):
                own[key] = model
        if step in ("ppo", "grpo", "agent"):
            own |= {"num_iterations": 1, "per_device_generation_batch_size": 4, "max_answer_seq_len": 8}
            own["inference_tp_size"] = min(own.get("inference_tp_size", 1), 2)
        else:
            own |= {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        if step == "sft":  # the tiny model has dropout, which supervised fine-tuning keeps
            own["training_forward"] = "model"
    return settings


def require_trained(settings: dict, directory: Path) -> None:
    """Every step has logged one iteration and saved a model."""
    for step in settings["steps"]:
        (row,) = iterations_of(directory / step)
        assert row.get("objective/scores", row.get("reward", row.get("loss"))) is not None
        assert (directory / step / "model" / "model.safetensors").is_file()


def run_recipe(settings: dict, directory: str) -> None:
    pipeline.run(parse(settings, ["--output_dir", directory]))


FAST = ("gsm8k",)


@pytest.mark.parametrize("name", slow_but(FAST, (*RECIPES, *OF_SETS, *OF_MODELS)))
def test_every_recipe_runs_a_tiny_step(name, ranks, tmp_path):
    """On rows with its sets' columns and two ranks; rollout and training logprobs are compared, which dropout would
    separate."""
    settings = tiny_recipe(name, chat_model(tmp_path / "small"), tmp_path)
    ranks.run(run_recipe, settings, str(tmp_path / "run"))
    require_trained(settings, tmp_path / "run")
    last = [*settings["steps"]][-1]
    (row,) = iterations_of(tmp_path / "run" / last)
    assert row["val/first_ratio_error"] < FIRST_RATIO
    end = tokenizer_of("gemma").convert_tokens_to_ids("<end_of_turn>")
    assert end in GenerationConfig.from_pretrained(tmp_path / "run" / last / "model").eos_token_id


@pytest.mark.slow
def test_the_recipe_of_an_agent_runs_a_tiny_step(ranks, small, tmp_path):
    settings = tiny_recipe("agent_openai", str(small / "agent_model"), tmp_path)
    settings["steps"]["agent"] |= {"num_generations": 2, "max_answer_seq_len": 24}
    ranks.run(run_recipe, settings, str(tmp_path / "run"))
    require_trained(settings, tmp_path / "run")


QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
QWEN3_1_7B = ("qwen3", (2048, 6144, 28, 16), {**QWEN3, "tie_word_embeddings": True})
# Recipe → the model of its figures; sizes that are not here are transformers' defaults.
PLANNED = {
    "qwen3_gsm8k": QWEN3_1_7B,
    "qwen3_5_lora": ("qwen3_5_text", (), {}),
    "gpt_oss_20b_lora": ("gpt_oss", (), {"num_hidden_layers": 24, "num_local_experts": 32}),
    "8gpu_qwen3_8b_full": ("qwen3", (4096, 12288, 36, 32), {**QWEN3, "tie_word_embeddings": False}),
    "agent_openai": QWEN3_1_7B,
}


def plan_flags(name: str) -> str:
    """The flags of `hybrid plan` in a recipe's comment."""
    text = " ".join((CONFIGS / f"{name}.yaml").read_text().replace("\n#", "").split())
    return re.search(r"--ranks .*?--device-memory 80GiB", text).group()


@pytest.mark.parametrize("name", PLANNED)
def test_recipes_of_models_say_what_was_planned_and_run(name):
    """Their settings are valid, and those of the plan."""
    settings = parse(read_yaml(CONFIGS / f"{name}.yaml"), [])
    *_, step = settings.steps
    args, flags = arguments_of_step(step, settings), plan_flags(name)
    rows = args.per_device_generation_batch_size * args.num_generations
    assert f"--batch-size {rows} --prompt-length {args.max_prompt_seq_len} " in flags
    assert f"--max-new-tokens {args.max_answer_seq_len} " in flags
    assert (f"--lora {args.actor_lora_dim} " in flags) == bool(args.actor_lora_dim)
    assert "Not this model." in (CONFIGS / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", PLANNED)
def test_figures_of_recipes_of_models_are_those_of_the_plan(name, tmp_path):
    kind, sizes, more = PLANNED[name]
    AutoConfig.for_model(kind, **dict(zip(SIZE_NAMES, sizes, strict=False)), **more).save_pretrained(tmp_path)
    printed = CliRunner().invoke(app, ["plan", str(tmp_path), *plan_flags(name).split()], catch_exceptions=False).stdout
    expected = {" ".join(line.removesuffix("in use").split()) for line in printed.splitlines()}
    text = (CONFIGS / f"{name}.yaml").read_text()
    figures = [" ".join(line.strip("# ").split()) for line in text.splitlines() if re.search(r"\d\.\d +\d+\.\d", line)]
    assert figures and set(figures) <= expected
    held = re.search(r"Training holds ([\d.]+ GiB)", printed).group(1)
    assert held in " ".join(text.replace("\n#", "").split())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_commands_of_the_readme_run(tmp_path):
    """Verbatim, on two ranks, with files of the names that they use."""
    _, block = re.findall(r"```bash\n(.*?)```", README.read_text(), re.S)
    commands = block.replace("\\\n", " ").replace("--nproc_per_node=8", "--nproc_per_node=2").splitlines()
    chat_model(tmp_path / "my-model")
    settings = tiny_recipe("8gpu_7b_lora", "my-model", tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "8gpu_7b_lora.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    lines = (json.dumps({"prompt": f"anna found {number} red balls ."}) for number in range(40))
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    (tmp_path / "my_rewards.py").write_text("from tests.rlhf_examples.scripts import number_of_words as correct")
    by_pipeline, by_grpo = map(shlex.split, commands)
    small = {**ROLLOUTS, "num_iterations": 2, "num_generations": 2}
    by_grpo += [text for name, value in small.items() if value != [] for text in (f"--{name}", str(value))]
    path = f"{README.parent}:{tmp_path}"
    for command in (by_pipeline, by_grpo):
        run_together([command], tmp_path, PYTHONPATH=path)
    require_trained(settings, tmp_path / "runs" / "8gpu_7b_lora")
    assert (tmp_path / "runs" / "8gpu_7b_lora" / "report.html").stat().st_size > 10_000
    assert len(iterations_of(tmp_path / "runs" / "grpo")) == 2

"""The pages in docs/: code blocks run, keys and messages exist in the engine, the reference is up to date."""

import ast
import functools
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from deepspeed.inference.config import (
    DeepSpeedInferenceConfig,
    DeepSpeedMoEConfig,
    DeepSpeedTPConfig,
    InferenceCheckpointConfig,
    QuantizationConfig,
)
from deepspeed.inference.config import WeightQuantConfig as DeepSpeedWeightQuantConfig

import hybrid
from docs.make_api import TABLE_BEGINS, TABLE_ENDS, entry, inference_table, key_texts, page
from hybrid.__main__ import app
from hybrid.config import (
    BLOCKS,
    FORWARDED,
    Block,
    CheckpointConfig,
    InferenceConfig,
    MoEConfig,
    QuantConfig,
    TensorParallelConfig,
    WeightQuantConfig,
)
from hybrid.models.families import LLAMA, OLMO2, without
from rlhf_examples.common.arguments import PPOArguments
from tests.compat.test_install import fresh_accelerate_state, quietly
from tests.engines import engine_of, settings
from tests.tiny_models import prompts, tiny_model, with_peft

ROOT = Path(__file__).resolve().parents[1]
MIGRATION, TROUBLE = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("migration", "troubleshooting"))


def blocks_under(heading: str) -> list[str]:
    """The code of a section of the migration page."""
    (section,) = (part for part in MIGRATION.split("\n## ") if part.startswith(heading))
    return re.findall(r"```python\n(.*?)```", section, re.S)


OUTSIDE = ["README.md", "CONTRIBUTING.md", "hybrid/models/README.md"]
PAGES = [*(ROOT / page for page in OUTSIDE), *sorted(ROOT.glob("docs/**/*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_every_code_block_has_a_language(page):
    """ "python" blocks are run by this file, `test_readme.py`, `test_environments.py` and `test_trl.py`; "bash" by
    `test_launchers.py`, `test_recipes.py` and, for `make`, CI; all of `docs/jobs/` by `test_job_pages.py`; all of
    `upstream.md` by `test_upstream.py`. "text" is not run, and is not Python."""
    fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
    assert len(fences) % 2 == 0 and set(fences[1::2]) <= {""}
    allowed = {
        "README.md": {"python", "bash", "text"},
        "launchers.md": {"bash", "text"},
        "migration.md": {"python"},
        "environments.md": {"python"},
        "upstream.md": {"python"},
        "index.md": {"python"},
        "settings.md": {"python", "text"},
    }
    of_jobs = {"python", "bash", "diff", "json", "yaml", "text"}
    assert set(fences[::2]) <= (of_jobs if page.parent.name == "jobs" else allowed.get(page.name, {"text"}))


def is_python(block: str) -> bool:
    """Whether a block is Python that calls something."""
    try:
        statements = ast.parse(block).body
    except SyntaxError:
        return False
    statements = [each for each in statements if not isinstance(each, ast.AnnAssign)]  # YAML's keys
    return any(isinstance(node, ast.Call) for statement in statements for node in ast.walk(statement))


@every_page
def test_no_python_is_called_text(page):
    assert is_python("f(1)") and not is_python("a: b(c)") and not is_python("make test")
    assert [
        block for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S) if is_python(block)
    ] == []


@every_page
def test_commands_of_hybrid_have_the_options_that_pages_name(page):
    """Inline or in a block; parsed, not run."""
    commands = typer.main.get_command(app).commands
    for text in re.findall(r"`(?:python -m )?hybrid ((?:doctor|plan|report)\b[^`]*)`", page.read_text()):
        name, *arguments = shlex.split(text)
        if arguments or name == "doctor":
            commands[name].make_context(name, arguments)


@every_page
def test_files_named_in_pages_exist(page):
    text = page.read_text()
    names = set(re.findall(r"`((?:hybrid|rlhf_examples|configs|tests|docs|benchmarks)/[\w./]+)`", text))
    names |= set(re.findall(r"configs/\w+\.(?:yaml|json)", text))
    names |= set(re.findall(r"\]\(((?:docs|tests)/[\w./]+)\)", text))
    assert len(names) > 8 or page != ROOT / "README.md"
    assert [name for name in names if not (ROOT / name).exists()] == []
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert [name for name in pictures if not (page.parent / name).exists()] == []


def test_the_example_row_of_a_family_matches_the_code():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "hybrid/models/README.md").read_text(), re.S)
    names = {"replace": replace, "without": without, "LLAMA": LLAMA}
    exec(code, names)
    assert names["OLMO2"] == OLMO2


def check_blocks() -> None:
    for heading in ("From DeepSpeed's hybrid engine", "accelerate"):
        (code,) = blocks_under(heading)
        model = with_peft(tiny_model("llama"))
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        names = {"model": model, "trainable": trainable, "ids": ids, "mask": mask}
        with fresh_accelerate_state():
            quietly(exec, code, names)
        assert isinstance(names["engine"], hybrid.HybridEngine) and names["engine"].weight_version == 1
        assert names["tokens"].shape[1] > 6
        assert "same" not in names or names["same"].equal(names["tokens"])


def check_index_and_settings() -> None:
    """The few lines of the first page, and router replay, with its `loss_of`."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S)
    model = with_peft(tiny_model("llama", dtype=torch.bfloat16, max_position_embeddings=512))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = {"hybrid": hybrid, "model": model, "trainable": trainable, "prompt_ids": ids, "prompt_mask": mask}
    exec(code.replace("configs/", f"{ROOT}/configs/"), names)
    completions = names["batch"].completion_ids
    assert completions.shape[0] == 16 and names["reference"].per_token_logps.shape[0] == 16
    names["engine"].destroy()

    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "settings.md").read_text(), re.S)
    engine = engine_of(tiny_model("mixtral"), settings(3, rollout={"return_router_indices": True}))
    names = {"hybrid": hybrid, "engine": engine, "ids": ids, "mask": mask, "sampling": hybrid.SamplingParams(8)}
    names |= {"micro_batches": [[0], [1]], "loss_of": lambda logits, part: logits.float().mean()}
    exec(code, names)
    assert names["batch"].router_indices.shape[0] == 2 and names["loss"].isfinite()


def test_code_of_the_first_page_and_of_router_replay_runs(ranks):
    ranks.run(check_index_and_settings)


def test_code_of_the_migration_page_runs(ranks):
    ranks.run(check_blocks)


def test_the_inference_settings_table_is_up_to_date():
    text = (ROOT / "docs" / "inference.md").read_text()
    table = text.partition(TABLE_BEGINS)[2].partition(TABLE_ENDS)[0]
    assert table == inference_table(), "run: python docs/make_api.py"
    assert "| `tensor_parallel.tp_size` | `1` | ranks that share one copy of the weights | neighbours" in table
    assert "| `max_out_tokens`, `max_tokens` | `1024` |" in table


@pytest.mark.parametrize(
    ("config", "deepspeed_config"),
    [
        (InferenceConfig, DeepSpeedInferenceConfig),
        (TensorParallelConfig, DeepSpeedTPConfig),
        (MoEConfig, DeepSpeedMoEConfig),
        (WeightQuantConfig, DeepSpeedWeightQuantConfig),
        (QuantConfig, QuantizationConfig),
        (CheckpointConfig, InferenceCheckpointConfig),
    ],
)
def test_inference_keys_have_deepspeeds_defaults_and_descriptions(config, deepspeed_config):
    """Each key also has a description."""
    our_keys = {"strict", "speculation"} if config is InferenceConfig else set()
    forwarded = FORWARDED.keys() if config is InferenceConfig else set()
    assert config.model_fields.keys() - our_keys == deepspeed_config.model_fields.keys() - forwarded
    assert key_texts(config).keys() == config.model_fields.keys()
    for name in config.model_fields.keys() - our_keys - {"dtype", "enable_cuda_graph"}:
        default, expected = config.model_fields[name].default, deepspeed_config.model_fields[name].default
        if not isinstance(default, Block | dict):
            assert default == getattr(expected, "value", expected), name


def test_numbers_in_signatures_are_complete():
    def example(share: float = 1.0, small: float = 2.5e-3, kind: torch.dtype = torch.float32) -> None:
        """Text."""

    assert "one(share: float = 1.0, small: float = 0.0025, kind: dtype = float32)" in entry("one", example)


def test_keys_named_in_pages_are_settings():
    named = set(re.findall(r"`(hybrid_engine|rollout)\.(\w+)[`:]", MIGRATION + TROUBLE))
    assert len(named) > 6
    assert {key for block, key in named if key not in BLOCKS[block].model_fields} == set()
    (table,) = re.findall(r"\| key of `hybrid_engine` \| here \|\n\|---\|---\|\n((?:\|.*\n)*)", MIGRATION)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(BLOCKS["hybrid_engine"].model_fields)


# From DeepSpeed-Chat's `training/step3_rlhf_finetuning/main.py` (DeepSpeedExamples 6eb5247), in its `parse_args`.
FLAGS_OF_DEEPSPEED_CHAT = """
data_path data_split data_output_path unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef
actor_model_name_or_path critic_model_name_or_path num_padding_at_beginning per_device_generation_batch_size
per_device_training_batch_size generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len actor_learning_rate
critic_learning_rate actor_weight_decay critic_weight_decay num_train_epochs lr_scheduler_type
gradient_accumulation_steps num_warmup_steps output_dir seed local_rank enable_hybrid_engine unpin_actor_parameters
release_inference_cache inference_tp_size tp_gather_partition_size offload dtype offload_reference_model
actor_zero_stage critic_zero_stage actor_gradient_checkpointing critic_gradient_checkpointing actor_dropout
critic_dropout actor_lora_dim actor_lora_module_name critic_lora_dim critic_lora_module_name only_optimize_lora
actor_lora_learning_rate critic_lora_learning_rate compute_fp32_loss enable_ema enable_mixed_precision_lora
enable_tensorboard tensorboard_path add_eot_token print_answers print_answers_interval enable_test_mode test_stop_step
align_overflow offload_reward_model preprocessing_num_workers
""".split()


def test_every_flag_of_deepspeed_chat_is_documented():
    (table,) = re.findall(r"\| DeepSpeed-Chat's flag \|.*\n\|---\|---\|\n((?:\|.*\n)*)", MIGRATION)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    flags = [name for left, _ in rows for name in re.findall(r"`(\w+)`", left)]
    our_flags = {field.name for field in fields(PPOArguments)}
    assert sorted(flags) == sorted(FLAGS_OF_DEEPSPEED_CHAT)
    for left, right in rows:
        named = re.findall(r"`(\w+)`", left if right.startswith("the same") else right)
        assert [name for name in named if name not in {*our_flags, "target_modules"}] == []


@functools.cache
def message_texts() -> str:
    """Every string in the engine's code, with "…" for formatted values."""
    texts = []
    for path in sorted((ROOT / "hybrid").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


HEADINGS = re.findall(r"^### `(.*)`$", TROUBLE, re.M)


@pytest.mark.parametrize("message", HEADINGS)
def test_documented_messages_exist_in_the_engine(message):
    for part in filter(None, map(str.strip, message.split("…"))):
        assert part.strip(" ;,:") in message_texts(), part


def test_troubleshooting_has_messages():
    assert len(HEADINGS) > 15 and "a message that does not exist" not in message_texts()


def test_the_reference_is_up_to_date():
    assert (ROOT / "docs" / "api.md").read_text() == page(), "run: python docs/make_api.py"

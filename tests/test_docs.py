"""The pages in docs/: code blocks run, keys and messages exist in the engine, every setting and name is listed."""

import ast
import functools
import json
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
from hybrid.__main__ import app
from hybrid.config import (
    BLOCKS,
    FORWARDED,
    Block,
    CheckpointConfig,
    InferenceConfig,
    MoEConfig,
    QuantConfig,
    SpeculationConfig,
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


OUTSIDE = ["README.md", "CONTRIBUTING.md", "LOG.md", "hybrid/models/README.md"]
PAGES = [*(ROOT / page for page in OUTSIDE), *sorted(ROOT.glob("docs/**/*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_every_code_block_has_a_language(page):
    """ "python" blocks are run by this file, `test_readme.py`, `test_environments.py` and `test_trl.py`; "bash" by
    `test_launchers.py`, `test_recipes.py` and, for `make`, CI; all of `docs/jobs/` by `test_job_pages.py`; all of
    `upstream.md` and `upstream_reports.md` by `test_upstream.py`. "text" is not run, and is not Python."""
    fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
    assert len(fences) % 2 == 0 and set(fences[1::2]) <= {""}
    allowed = {
        "README.md": {"python", "bash", "text"},
        "launchers.md": {"bash", "text"},
        "migration.md": {"python"},
        "environments.md": {"python"},
        "upstream.md": {"python"},
        "upstream_reports.md": {"python"},
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
    for text in re.findall(r"`(?:python -m )?hybrid ((?:doctor|plan|report|replay)\b[^`]*)`", page.read_text()):
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


FOLLOWED = ["README.md", *(f"docs/{name}.md" for name in ("index", "inference", "settings", "rlhf", "environments"))]
FOLLOWED += [f"docs/{name}.md" for name in ("launchers", "migration", "troubleshooting", "comparison")]
FOLLOWED += ["docs/upstream_reports.md"]
FOLLOWED += [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/jobs/*.md"))]
MAX_WORDS = 25


def sentences(page: str) -> list[str]:
    """The sentences of a page's paragraphs, list items and table cells. Code is one word, and a link's target none."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|^\[[\w-]+\]: .*?$", "\n\n", page, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", text))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )|(?<!\\)\|", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\W_]*[A-Z0-9])", block)]
    return [" ".join(part.split()) for part in parts if re.search(r"\w", part)]


def test_sentences_are_found_where_prose_is():
    prose = "# Head\n\nOne `a b c`. Two\nthree.\n\n- four\n- five\n\n| a. B | c |\n|---|---|\n"
    page = f"{prose}\n```text\nno. No\n```\n\n[x](y z)."
    assert sentences(page) == ["# Head", "One CODE.", "Two three.", "- four", "- five", "a.", "B", "c", "[x]."]


@pytest.mark.parametrize("page", FOLLOWED)
def test_sentences_of_pages_that_people_follow_are_short(page):
    counts = {each: len(re.findall(r"\S*\w\S*", each)) for each in sentences((ROOT / page).read_text())}
    long = [f"{count}: {each}" for each, count in counts.items() if count > MAX_WORDS]
    assert not long, "\n".join(long)


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


def settings_of(block: type[Block], path: str) -> dict[str, str]:
    """The default as JSON of every key of a block, and of the blocks in it; "" for a block."""
    defaults: dict[str, str] = {}
    for name, field in block.model_fields.items():
        keys = ", ".join(f"`{path}{key}`" for key in (name, field.alias) if key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            defaults |= {keys: ""} | settings_of(field.annotation, f"{path}{name}.")
        else:
            defaults[keys] = f"`{json.dumps(field.default)}`"
    return defaults


def table_with(page: str, head: str) -> list[list[str]]:
    """The cells of the rows of a page's table."""
    text = (ROOT / "docs" / page).read_text()
    (table,) = re.findall(rf"^\| {re.escape(head)} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()]


def test_the_inference_page_lists_every_key_with_its_default():
    table = table_with("inference.md", "key | default | meaning | other than in DeepSpeed")
    assert {row[0]: row[1] for row in table} == settings_of(InferenceConfig, "")
    assert all(len(row) == 4 and row[2] for row in table)
    old = (ROOT / "docs" / "inference.md").read_text().partition("\nOld names")[2]
    assert dict(re.findall(r"`(\w+)` is `([\w.]+)`", old)) == {
        name: f"{block}.{key}" for name, (block, key) in FORWARDED.items()
    }


@pytest.mark.parametrize("block", ["hybrid_engine", "rollout", "rollout.speculation"])
def test_the_settings_page_lists_every_key_with_its_default(block):
    table = table_with("settings.md", f"key of `{block}` | default | meaning")
    expected = settings_of((BLOCKS | {"rollout.speculation": SpeculationConfig})[block], "")
    assert {row[0]: row[1] for row in table} == {keys.split(", ")[0]: default for keys, default in expected.items()}
    assert all(len(row) == 3 and row[2] for row in table)


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
    our_keys = {"strict", "speculation", "trust_forward"} if config is InferenceConfig else set()
    forwarded = FORWARDED.keys() if config is InferenceConfig else set()
    assert config.model_fields.keys() - our_keys == deepspeed_config.model_fields.keys() - forwarded
    for name in config.model_fields.keys() - our_keys - {"dtype", "enable_cuda_graph"}:
        default, expected = config.model_fields[name].default, deepspeed_config.model_fields[name].default
        if not isinstance(default, Block | dict):
            assert default == getattr(expected, "value", expected), name


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


def test_the_release_notes_name_old_and_new_flags_and_names():
    flags = table_with("releases/0.3.md", "flag of `rlhf_examples.ppo` in 0.2 | flag now")
    names = {field.name for field in fields(PPOArguments)}
    assert {name for row in flags for name in re.findall(r"`(\w+)`", row[0])} & names == set()
    assert {name for row in flags for name in re.findall(r"`(\w+)`", row[1])} <= names
    table = table_with("releases/0.3.md", "old name | name now")
    new = {name for row in table for name in re.findall(r"`(?:hybrid|rollout|batch)\.(\w+)`", row[1])}
    per_token = {field.name for field in fields(hybrid.RolloutBatch)}
    assert {"max_num_seqs", "SamplingParams", "old_per_token_logps"} <= new
    assert new <= {*hybrid.__all__, "compat", *BLOCKS["rollout"].model_fields, *per_token}


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


def test_every_public_name_is_on_the_api_page():
    """`test_site.py` checks what is made of it."""
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    others = ["hybrid.compat.trl.rollout_func", "hybrid.training.deepspeed_api.DeepSpeedMethods"]
    assert sorted(names) == sorted([*(f"hybrid.{name}" for name in hybrid.__all__), *others])

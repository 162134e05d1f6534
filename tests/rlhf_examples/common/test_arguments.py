"""Arguments: a YAML file, flags over it, and errors that name the key."""

from pathlib import Path

import pytest

from rlhf_examples.common.arguments import (
    AgentArguments,
    ChatArguments,
    DistillArguments,
    DPOArguments,
    EvaluateArguments,
    GRPOArguments,
    PPOArguments,
    RewardModelArguments,
    SFTArguments,
    VisionGRPOArguments,
)
from rlhf_examples.common.parsing import parse_arguments, read_yaml
from rlhf_examples.common.steps import SCRIPTS, arguments_of_step, parse

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*.yaml"))
PIPELINES = [path for path in CONFIGS if "steps" in read_yaml(path)]
KINDS = [SFTArguments, RewardModelArguments, DPOArguments, PPOArguments, GRPOArguments, EvaluateArguments]
KINDS += [ChatArguments]


@pytest.mark.parametrize("path", sorted({*CONFIGS} - {*PIPELINES}), ids=lambda path: path.name)
def test_every_other_config_parses_as_ppo_arguments(path):
    args = parse_arguments(PPOArguments, [str(path)])
    for name, value in read_yaml(path).items():
        assert getattr(args, name) in (value, [value])


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_every_config_parses_as_a_pipeline(path):
    settings = read_yaml(path)
    args = parse(read_yaml(path), ["--output_dir", "runs/elsewhere"])
    for name, own in settings["steps"].items():
        of_step = arguments_of_step(name, args)
        for key, value in own.items():
            if key != "script" and "step:" not in str(value):
                assert getattr(of_step, key) in (value, [value])
    keys = {key for name in args.steps for key in vars(arguments_of_step(name, args))}
    assert settings.get("common", {}).keys() <= keys, "a common setting that no step has"


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nactor_lora_dim: 4\nactor_learning_rate: 1.0e-5\nenable_hybrid_engine: false\n")
    flags = ["--seed", "9", "--stop_token_ids", "1", "2", "--adap_kl_ctrl"]
    args = parse_arguments(PPOArguments, [str(path), *flags])
    assert (args.seed, args.actor_lora_dim, args.actor_learning_rate) == (9, 4, 1e-5)
    assert (args.stop_token_ids, args.adap_kl_ctrl, args.enable_hybrid_engine) == ([1, 2], True, False)


def test_a_mapping_in_the_file_is_json_in_a_flag(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("chat_template_kwargs: {enable_thinking: false}\n")
    from_file = parse_arguments(SFTArguments, [str(path)])
    assert from_file == parse_arguments(SFTArguments, ["--chat_template_kwargs", '{"enable_thinking": false}'])
    path.write_text("seed: {a: 1}\n")
    with pytest.raises(ValueError, match=r"seed: .* given; it must be int"):
        parse_arguments(SFTArguments, [str(path)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_arguments_give_the_defaults(kind):
    assert parse_arguments(kind, []) == kind()
    assert parse_arguments(kind, ["--local_rank=1"]) == kind()  # DeepSpeed's launcher


def test_ppo_constants_match_deepspeed_chat():
    args = PPOArguments()
    hard_coded = {"kl_ctl": 0.1, "clip_reward": 5.0, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1, "lam": 0.95}
    assert {name: getattr(args, name) for name in hard_coded} == hard_coded


def test_an_unknown_key_raises_with_the_nearest_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("kl_coeff: 3\nkl_ctrl: 1\n")
    with pytest.raises(ValueError, match="unknown key 'kl_coeff'; the nearest known key is '"):
        parse_arguments(PPOArguments, [str(path)])
    with pytest.raises(ValueError, match="unknown key 'kl_ctrl'; the nearest known key is 'kl_ctl'"):
        parse_arguments(PPOArguments, ["--kl_ctrl", "3"])
    with pytest.raises(ValueError, match="no file at 'nowhere.yaml'"):
        parse_arguments(PPOArguments, ["nowhere.yaml"])
    path.write_text("- 3\n")
    with pytest.raises(ValueError, match="it contains a list; it must be a mapping of settings"):
        parse_arguments(PPOArguments, [str(path)])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (SFTArguments, {"dtype": "float8"}, "dtype: 'float8' given; allowed: float32, bfloat16"),
        (SFTArguments, {"zero_stage": 4}, "zero_stage: 4 given; allowed: 0, 1, 2, 3"),
        (
            SFTArguments,
            {"torch_compile": True, "training_forward": "exact"},
            "torch_compile: true given with training_forward: 'exact' and zero_stage: 3",
        ),
        (SFTArguments, {"keep_last": 0}, "keep_last: 0 given; it must be at least 1"),
        (SFTArguments, {"eval_fraction": 2.0}, "eval_fraction: 2.0 given; it must be at most 1"),
        (
            SFTArguments,
            {"training_forward": "padded"},
            "training_forward: 'padded' given; allowed: model, packed, exact",
        ),
        (
            SFTArguments,
            {"lora_dropout": 0.1},
            "0.1 given with training_forward: 'packed'.*give lora_dropout: 0, or training_forward: 'model'",
        ),
        (RewardModelArguments, {"loss_form": "first"}, "loss_form: 'first' given; allowed: last, tokenwise"),
        (PPOArguments, {"logprob_mode": "guess"}, "logprob_mode: 'guess' given"),
        (
            PPOArguments,
            {"importance_sampling_correction": True, "logprob_mode": "sampling"},
            "every ratio would be 1; use logprob_mode: 'recompute'",
        ),
        (
            GRPOArguments,
            {"rollout_weight_dtype": "int8"},
            "'int8' given with importance_sampling_correction: false.*use true, or 'model'",
        ),
        (PPOArguments, {"rollout_weight_dtype": "int4"}, "rollout_weight_dtype: 'int4' given; allowed: model, int8"),
        (
            PPOArguments,
            {"importance_sampling_clip_max": 0.5},
            "clip_max: 0.5 given; it must be at least 1",
        ),
        (PPOArguments, {"numerics_control_rows": -1}, "numerics_control_rows: -1 given; it must be at least 0"),
        (PPOArguments, {"critic_zero_stage": 4}, "critic_zero_stage: 4 given; allowed: 0, 1, 2, 3"),
        (GRPOArguments, {"loss_type": "ppo"}, "loss_type: 'ppo' given; allowed: grpo, dr_grpo, dapo, bnpo"),
        (GRPOArguments, {"num_generations": 1}, "num_generations: 1 given; it must be at least 2"),
        (
            GRPOArguments,
            {"loss_type": "cispo"},
            "epsilon_high: 0.0 given with loss_type: 'cispo', where it is the upper bound of the ratio itself",
        ),
        (
            GRPOArguments,
            {"loss_type": "sapo", "epsilon": 0.3},
            "epsilon: 0.3 given with loss_type: 'sapo', which has none; give one of grpo, dr_grpo, dapo, bnpo, luspo",
        ),
        (GRPOArguments, {"sapo_temperature_pos": 2.0}, "sapo_temperature_pos: 2.0 given with loss_type: 'dapo'"),
        (GRPOArguments, {"loss_type": "kl_cov", "delta": 2.0}, "delta: 2.0 given with loss_type: 'kl_cov'"),
        (
            GRPOArguments,
            {"loss_type": "gmpo", "importance_sampling_level": "sequence"},
            "importance_sampling_level: 'sequence' given with loss_type: 'gmpo'; give 'token', or one of grpo",
        ),
        (GRPOArguments, {"loss_type": "luspo"}, "'token' given with loss_type: 'luspo'.*give 'sequence'"),
        (
            GRPOArguments,
            {
                "loss_type": "vespo",
                "importance_sampling_correction": True,
                "importance_sampling_mode": "sequence_mask",
            },
            "importance_sampling_mode: 'sequence_mask' given with loss_type: 'vespo'.*give token_truncate",
        ),
        (GRPOArguments, {"entropy_target": 1.0}, "entropy_target: 1.0 given with use_adaptive_entropy: false"),
        (
            GRPOArguments,
            {"use_adaptive_entropy": True, "entropy_coef": 2.0},
            "entropy_coef: 2.0 given with use_adaptive_entropy; it must lie between entropy_coef_min, 0.0",
        ),
        (
            GRPOArguments,
            {"advantages": "opo", "scale_rewards": "none"},
            "scale_rewards: 'none' given with advantages: 'opo'; allowed: group",
        ),
        (GRPOArguments, {"gamma": 0.9}, "gamma: 0.9 given with advantages: 'group'"),
        (GRPOArguments, {"use_kl_in_reward": True}, "use_kl_in_reward: true given with beta: 0"),
        (
            GRPOArguments,
            {"advantages": "remax", "partial_rollout": True, "importance_sampling_correction": True},
            "advantages: 'remax' given with dynamic_sampling or partial_rollout",
        ),
        (
            GRPOArguments,
            {"advantages": "rloo", "multi_objective_aggregation": "normalize_then_sum"},
            "advantages: 'rloo' given with multi_objective_aggregation: 'normalize_then_sum'",
        ),
        (
            GRPOArguments,
            {"keep_sampling_mask": True},
            "keep_sampling_mask: true given with top_p: 1 and top_k: 0, which leave no token out",
        ),
        (
            AgentArguments,
            {"keep_sampling_mask": True, "top_k": 4, "harness": "tests.rlhf_examples.test_agent:play"},
            "keep_sampling_mask: true given with harness",
        ),
        (DistillArguments, {"keep_sampling_mask": True, "top_k": 4}, "keep_sampling_mask: true given; distillation"),
        (VisionGRPOArguments, {"keep_sampling_mask": True, "top_k": 4}, "keep_sampling_mask: True given; leave it out"),
        (AgentArguments, {"advantages": "remax"}, "advantages: 'remax' given; leave it out here, or run"),
        (VisionGRPOArguments, {"use_adaptive_entropy": True}, "use_adaptive_entropy: True given; leave it out here"),
        (DPOArguments, {"loss_type": "ipo"}, "loss_type: 'ipo' given; allowed: sigmoid, kto, orpo"),
        (
            DPOArguments,
            {"loss_type": "orpo", "label_smoothing": 0.1},
            "label_smoothing: 0.1 given with loss_type: 'orpo', which has none; give sigmoid",
        ),
        (DPOArguments, {"desirable_weight": 2.0}, "desirable_weight: 2.0 given with loss_type: 'sigmoid'.*give kto"),
        (
            DPOArguments,
            {"loss_type": "kto", "per_device_train_batch_size": 1},
            "per_device_train_batch_size: 1 given with loss_type: 'kto'.*give at least 2",
        ),
    ],
)
def test_invalid_values_raise_with_the_key(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**changes)


def test_pipeline_errors_raise_before_the_first_step():
    good = {"steps": {"sft": {}, "ppo": {"actor_model_name_or_path": "step:sft/model"}}}
    args = parse({**good, "output_dir": "here"}, [])
    assert arguments_of_step("ppo", args).actor_model_name_or_path == "here/sft/model"
    wrong = {
        "steps.sft: unknown key 'learning_rat'; the nearest known key is 'learning_rate'": {
            "steps": {"sft": {"learning_rat": 1}}
        },
        "steps.a: unknown key 'sftt'; the nearest known key is 'sft'": {"steps": {"a": {"script": "sftt"}}},
        "steps.ppo: unknown key 'sfd'; the nearest known key is": {
            "steps": {"ppo": {"actor_model_name_or_path": "step:sfd/model"}}
        },
        "summary.loss: unknown key 'sfd'": {**good, "summary": {"loss": "sfd/eval_loss"}},
        "steps: none given": {},
        "unknown key 'stepz'; the nearest known key is": {**good, "stepz": {}},
    }
    for message, settings in wrong.items():
        with pytest.raises(ValueError, match=message):
            parse(settings, [])


@pytest.mark.parametrize(
    ("seed_setting", "flags", "seed"), [({}, [], 0), ({"seed": 4}, [], 4), ({"seed": 4}, ["--seed", "5"], 5)]
)
@pytest.mark.parametrize("where", ["common", "pipeline"])
def test_the_seed_reaches_every_step(seed_setting, flags, seed, where):
    steps = {name: {} for name in SCRIPTS} | {"own": {"script": "sft", "seed": 9}}
    settings = {"steps": steps, **(seed_setting if where == "pipeline" else {"common": seed_setting})}
    args = parse(settings, flags)
    assert {name: arguments_of_step(name, args).seed for name in steps} == dict.fromkeys(SCRIPTS, seed) | {"own": 9}

"""RLHF rollouts in-process: a model trained under DeepSpeed ZeRO also generates, from the same weights."""

from hybrid.chat_template import cut_after_turn_end, turn_end_token
from hybrid.compat.install import install, installed, uninstall
from hybrid.compat.rollout_engine import HybridRollout, build_rollout
from hybrid.decoders.routers import replay_routing
from hybrid.engine import HybridEngine
from hybrid.environments import MessageEnvironment
from hybrid.episodes import Episodes
from hybrid.generation.numerics import sampling_metrics
from hybrid.generation.sampler import selective_log_softmax
from hybrid.generation.scoring import Scores, padded_forward
from hybrid.inference.auto_tp import LayerPolicy
from hybrid.inference.engine import InferenceEngine, init_inference
from hybrid.initialize import initialize
from hybrid.rollout import EnvironmentLimits, Observation, RolloutBatch, SamplingParams, StopAfter, UnfinishedRows
from hybrid.step_environment import StepEnvironment

__all__ = [
    "EnvironmentLimits",
    "Episodes",
    "HybridEngine",
    "HybridRollout",
    "InferenceEngine",
    "LayerPolicy",
    "MessageEnvironment",
    "Observation",
    "RolloutBatch",
    "SamplingParams",
    "Scores",
    "StepEnvironment",
    "StopAfter",
    "UnfinishedRows",
    "build_rollout",
    "cut_after_turn_end",
    "init_inference",
    "initialize",
    "install",
    "installed",
    "padded_forward",
    "replay_routing",
    "sampling_metrics",
    "selective_log_softmax",
    "turn_end_token",
    "uninstall",
]

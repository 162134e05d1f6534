"""The public names, which `hybrid/__init__.py` has too."""

from hybrid.compat.install import install, installed, uninstall
from hybrid.compat.rollout_engine import HybridRollout, build_rollout
from hybrid.environments.chat_template import cut_after_turn_end, turn_end_token
from hybrid.environments.episodes import ConversationEnvironment
from hybrid.environments.message_environment import MessageEnvironment
from hybrid.environments.step_environment import StepEnvironment
from hybrid.generation.routing import replay_routing
from hybrid.generation.scoring import Distributions, Scores, padded_forward
from hybrid.inference.auto_tp import LayerPolicy
from hybrid.inference.engine import InferenceEngine, init_inference
from hybrid.rollout import EnvironmentLimits, Observation, RolloutBatch, SamplingParams, StopAfter, UnfinishedRows
from hybrid.runtime.extension_lock import init_distributed
from hybrid.runtime.redaction import redacted
from hybrid.sampling.numerics import sampling_metrics
from hybrid.sampling.sampler import selective_log_softmax
from hybrid.serving.limits import ServerLimits
from hybrid.serving.openai_server import OpenAIServer, openai_server
from hybrid.serving.server import Chunk, Completion, Server, ServerBusy, ServerClosed, ServerStats, TokenScores
from hybrid.training.engine import HybridEngine
from hybrid.training.initialize import initialize
from hybrid.training.logps import TokenLogits, TokenLosses

__all__ = [
    "Chunk",
    "Completion",
    "ConversationEnvironment",
    "Distributions",
    "EnvironmentLimits",
    "HybridEngine",
    "HybridRollout",
    "InferenceEngine",
    "LayerPolicy",
    "MessageEnvironment",
    "Observation",
    "OpenAIServer",
    "RolloutBatch",
    "SamplingParams",
    "Scores",
    "Server",
    "ServerBusy",
    "ServerClosed",
    "ServerLimits",
    "ServerStats",
    "StepEnvironment",
    "StopAfter",
    "TokenLogits",
    "TokenLosses",
    "TokenScores",
    "UnfinishedRows",
    "build_rollout",
    "cut_after_turn_end",
    "init_distributed",
    "init_inference",
    "initialize",
    "install",
    "installed",
    "openai_server",
    "padded_forward",
    "redacted",
    "replay_routing",
    "sampling_metrics",
    "selective_log_softmax",
    "turn_end_token",
    "uninstall",
]

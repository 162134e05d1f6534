"""Gymnasium's and OpenEnv's environments in a conversation: a turn's text is the action, an observation a message."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybrid.environments.chat_template import Messages
from hybrid.environments.tool_calls import error_text
from hybrid.runtime.background_loop import call


@dataclass(frozen=True)
class Reply:
    """The messages that follow a turn, the turn's reward, and whether the episode ends."""

    messages: Messages = field(default_factory=list)
    reward: float | None = None
    done: bool = False


def no_arguments(example: dict[str, Any]) -> dict[str, Any]:
    """`reset` without arguments, whatever the example is."""
    return {}


class StepEnvironment:
    """An environment with Gymnasium's or OpenEnv's `reset()` and `step(action)`, for `MessageEnvironment`.

    The text of an assistant's turn is the action; an observation is the next user message. The first one is appended to
    the last message of the prompt. `reset` and `step` may be coroutine functions.

    Args:
        env: `step` gives (observation, reward, terminated, truncated, info), (observation, reward, done, info), or an
            object with `observation`, `reward` and `done`; `reset` gives an observation, (observation, info), or an
            object with `observation`.
        parse_action: from a turn's text to the action. A ValueError becomes an error message to the model.
        observation_text: from an observation to its text.
        reset_arguments: from an example to the keyword arguments of `reset`, such as a seed.
    """

    def __init__(
        self,
        env: Any,
        parse_action: Callable[[str], Any] = str,
        observation_text: Callable[[Any], str] = str,
        reset_arguments: Callable[[dict[str, Any]], dict[str, Any]] = no_arguments,
    ):
        self.env, self.parse_action = env, parse_action
        self.observation_text, self.reset_arguments = observation_text, reset_arguments

    async def reset(self, **example: Any) -> str:
        """Return the first observation as text."""
        result = await call(self.env.reset, **self.reset_arguments(example))
        observation = result[0] if isinstance(result, tuple) else getattr(result, "observation", result)
        return self.observation_text(observation)

    async def step(self, text: str) -> Reply:
        """Return the answer to a turn's text."""
        try:
            action = self.parse_action(text)
        except ValueError as error:
            return Reply([{"role": "user", "content": error_text(f"{type(error).__name__}: {error}")}])
        result = await call(self.env.step, action)
        if isinstance(result, tuple):
            observation, reward, *ends, _ = result
        else:
            observation, reward, ends = result.observation, result.reward, [result.done]
        said, done = self.observation_text(observation), any(ends)
        messages = [] if done and not said else [{"role": "user", "content": said}]
        return Reply(messages, None if reward is None else float(reward), done)

"""Environments at the level of messages: tools, TRL's environments, Gymnasium's and OpenEnv's, over a chat template.

`MessageEnvironment` has what all rollouts share; its `episodes(...)` is the environment of one rollout, with the
`reset` and `step` that `engine.rollout(environment=...)` calls.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.environments.chat_template import ChatTemplate
from hybrid.environments.episodes import (
    ChatFormat,
    ConversationEnvironment,
    ConversationState,
    EpisodeSettings,
    environment_tools,
)
from hybrid.environments.tool_calls import TurnParser, tool_schemas

HISTORIES = ("append", "template")


class MessageEnvironment:
    """Conversations with tools and environments, as TRL's GRPOTrainer takes them, for `engine.rollout`.

    A tool that raises, a call that cannot be parsed, and an unknown tool give an error message to the model. What an
    environment's `reset`, `step` or `get_reward` raises ends its row.

    Args:
        tools: functions, also coroutine functions, with type hints and Google-style docstrings.
        environment_factory: makes an environment for each row, of one of two kinds; or a dict of such functions, by the
            name that an example has as its "environment". TRL's kind: an object whose other public methods are tools,
            with `reset(**example)`, which gives None or a text that is appended to the prompt's last message, and
            optionally `get_reward()`. The other kind: a `StepEnvironment`. Objects are reused by later rollouts.
        max_tool_calling_iterations: turns of a row whose tool calls are answered; None: no limit.
        history: the context after a template has rewritten earlier turns (Qwen 3 drops their reasoning). "append": as
            it was sampled, with a warning, once. "template": the row forks, and goes on from the template's text.
        max_observation_tokens: the most tokens of an observation, the template's included. Longer contents are cut,
            with a note; a row whose observation does not fit even so ends. None: no limit.
        tool_timeout_s: seconds of a tool call; None: no limit. A function that takes longer goes on in its thread.
        chat_template_kwargs: other arguments of the chat template.
        response_template: how tool calls are written (transformers); None: the tokenizer's `response_template`, else by
            the chat template, if it writes calls as Qwen 2.5, Qwen 3 and Hermes do, or as Llama 3.1.

    Raises:
        ValueError: for a chat template that cannot render tool calls, and for values that are not allowed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Callable] = (),
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        *,
        max_tool_calling_iterations: int | None = None,
        history: str = "append",
        max_observation_tokens: int | None = None,
        tool_timeout_s: float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        response_template: dict[str, Any] | None = None,
    ):
        if history not in HISTORIES:
            raise ValueError(f"history: {history!r} given; it must be one of {', '.join(map(repr, HISTORIES))}")
        for name, limit, least in (
            ("max_tool_calling_iterations", max_tool_calling_iterations, 0),
            ("max_observation_tokens", max_observation_tokens, 1),
            ("tool_timeout_s", tool_timeout_s, 1e-3),
        ):
            if limit is not None and limit < least:
                raise ValueError(f"{name}: {limit!r} given; it must be at least {least}, or None for no limit")
        self.tools, self.by_name = list(tools), isinstance(environment_factory, dict)
        limits = max_tool_calling_iterations, max_observation_tokens, tool_timeout_s
        self.settings = EpisodeSettings(history, *limits, self.warn_once)
        factories: Any = environment_factory if self.by_name else {None: environment_factory or no_environment}
        self.factories: dict[Any, Callable[[], Any]] = factories
        self.instances = {name: [made(factory)] for name, factory in self.factories.items()}
        self.kinds = {
            name: conversation_kind(
                ChatTemplate(tokenizer, tool_schemas(self.tools_of(first)), chat_template_kwargs), response_template
            )
            for name, (first, *_) in self.instances.items()
        }
        self.has_warned = False

    def episodes(self, examples: Sequence[dict[str, Any]], num_generations: int = 1) -> ConversationEnvironment:
        """Return the environment of one rollout.

        The environment objects of the last call are used again: read its rewards first. Raises ValueError for a prompt
        that is no conversation, and for an unknown environment.

        Args:
            examples: one for each prompt of the rollout: "prompt", a conversation (without it: an empty user message),
                and what the environment's `reset` takes, as in TRL's data sets.
            num_generations: as given to the rollout.
        """
        for example in examples:
            check_example(example, sorted(self.factories) if self.by_name else None)
        drawn: dict[str | None, int] = dict.fromkeys(self.instances, 0)
        rows = []
        for example in examples:
            name = example["environment"] if self.by_name else None
            for _ in range(num_generations):
                instance = self.instance(name, drawn[name])
                drawn[name] += 1
                tools = {tool.__name__: tool for tool in self.tools_of(instance)}
                # As in TRL, "environment" names the environment and is no argument of its reset.
                kept = {key: value for key, value in example.items() if not (self.by_name and key == "environment")}
                rows.append(ConversationState(self.kinds[name], kept, instance, tools))
        return ConversationEnvironment(rows, self.settings, num_generations)

    def instance(self, name: str | None, index: int) -> Any:
        """Return the environment object number `index` of a name, made if there are fewer."""
        instances = self.instances[name]
        if index == len(instances):
            instances.append(made(self.factories[name]))
        return instances[index]

    def tools_of(self, instance: Any) -> list[Callable]:
        """Return the tools of a row with this environment object."""
        return [*self.tools, *environment_tools(instance)]

    def warn_once(self) -> None:
        """Warn, the first time, that the chat template rewrites earlier turns."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                "the chat template rewrites earlier turns once messages follow them (Qwen 3 drops their reasoning); "
                "with history='append' the context stays as it was sampled, which a chat server's context does not; "
                "history='template' trains on the template's contexts, with a row for each",
                stacklevel=2,
            )


def no_environment() -> None:
    """Return None: the factory of rows without an environment."""


def made(factory: Callable[[], Any]) -> Any:
    """Return a new environment object. Raises ValueError if it cannot be reset."""
    instance = factory()
    if instance is not None and not callable(getattr(instance, "reset", None)):
        raise ValueError(f"environment_factory: {type(instance).__name__} has no reset(); an environment must have one")
    return instance


def conversation_kind(template: ChatTemplate, response_template: dict[str, Any] | None) -> ChatFormat:
    """Return a template and the parser of its turns. Raises ValueError for tools that the template cannot render."""
    tools = template.settings["tools"]
    if tools and not template.supports_tools():
        raise ValueError(
            f"tools: {[tool['function']['name'] for tool in tools]} given, and the chat template does not render tool "
            "calls and their results; set a tokenizer.chat_template that does, or use hybrid.StepEnvironment, whose "
            "observations are user messages"
        )
    return ChatFormat(template, TurnParser(template, bool(tools), response_template), template.error_role())


def check_example(example: dict[str, Any], names: list[str] | None) -> None:
    """Raise ValueError for a prompt that is no conversation, and for an environment that is not among `names`."""
    prompt = example.get("prompt", [{}])
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        raise ValueError(f"prompt: {prompt!r} given; it must be a conversation, a list of messages")
    if names is not None and example.get("environment") not in names:
        raise ValueError(f"environment: {example.get('environment')!r} given; it must be one of {names}")

"""The conversations of one rollout: turns parsed and answered, and the tokens of the answers."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.environments.chat_template import PROBE, ChatTemplate, Messages, RejectedMessages
from hybrid.environments.step_environment import Reply, StepEnvironment
from hybrid.environments.tool_calls import MalformedCall, ToolResult, TurnParser, error_text, run_calls
from hybrid.rollout import Observation
from hybrid.runtime.background_loop import BACKGROUND, call

NOT_TOOLS = ("reset", "get_reward")  # public methods of TRL's environments that are no tools
CUT_NOTE = "\n[cut: {shown} of {total} tokens shown]"


@dataclass(frozen=True)
class EpisodeSettings:
    """`MessageEnvironment`'s settings of the same names, and what it is told.

    on_rewritten_history: called when a template rewrites earlier turns and `history` is "append".
    """

    history: str
    max_tool_calling_iterations: int | None
    max_observation_tokens: int | None
    tool_timeout_s: float | None
    on_rewritten_history: Callable[[], None]


@dataclass(frozen=True)
class ChatFormat:
    """The parts that conversations with the same tools share.  error_role: of messages about malformed tool calls."""

    template: ChatTemplate
    parser: TurnParser
    error_role: str

    def turn_of(self, ids: list[int], prompt: str, has_tools: bool) -> tuple[dict[str, Any], str]:
        """Return the assistant message of a turn's tokens, and the error of its tool calls, or "".

        Without tools no text is a call.

        Args:
            ids: the turn's tokens without its end token.
            prompt: the rendered prompt of the turn.
            has_tools: whether the turn may call tools.
        """
        plain = self.parser.plain(ids)
        try:
            turn = self.parser.parse(ids, prompt)
            if "tool_calls" in turn:
                self.template.render([PROBE[0], turn])  # Llama 3.1 takes one call in a turn
        except (MalformedCall, RejectedMessages) as error:
            return plain, str(error) if has_tools else ""
        return (turn, "") if has_tools or "tool_calls" not in turn else (plain, "")


@dataclass
class ConversationState:
    """A row's conversation.

    environment: the row's own object; None without a factory.  tools: its methods and the common ones, by name.
    rendered: the text of the next turn's prompt, by the template.
    iterations: turns whose tool calls were answered.  forks: times that the row went on from a prompt of its own.
    failed: the environment raised.
    """

    kind: ChatFormat
    example: dict[str, Any]
    environment: Any
    tools: dict[str, Callable]
    messages: Messages = field(default_factory=list)
    num_prompt_messages: int = 0
    rendered: str = ""
    iterations: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    forks: int = 0
    reward: float | None = None
    is_scored: bool = False
    failed: bool = False

    @property
    def is_stepped(self) -> bool:
        """Whether turns are actions of a StepEnvironment, which gives its rewards turn by turn."""
        return isinstance(self.environment, StepEnvironment)

    def start(self, text: Any) -> list[int]:
        """Begin the conversation: the prompt, with what the environment's `reset` gave. Gives the prompt's tokens."""
        self.messages = prompt_of(self.example)
        self.messages[-1] = with_appended(self.messages[-1], text)
        self.num_prompt_messages = len(self.messages)
        self.rendered = self.kind.template.render(self.messages, add_generation_prompt=True)
        return self.kind.template.encode(self.rendered)

    def parse(self, ids: list[int]) -> tuple[dict[str, Any], str]:
        """Return the assistant message of a turn's tokens, and the error of its tool calls, or ""."""
        return self.kind.turn_of(ids, self.rendered, bool(self.tools))

    @contextmanager
    def environment_call(self) -> Iterator[None]:
        """Note that the environment raised; the exception propagates, and ends the row."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise


class ConversationEnvironment:
    """The environment of one rollout, made by `MessageEnvironment.episodes`.

    Row `prompt * num_generations + sample` is a completion of that prompt. Functions of users run outside of the
    calling thread, in one background event loop and threads of their own.
    """

    def __init__(self, rows: list[ConversationState], settings: EpisodeSettings, num_generations: int):
        self.rows, self.settings, self.num_generations = rows, settings, num_generations

    def prompts(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompts with their tools, without the texts of `reset`: prompt_ids and prompt_mask, int64
        [prompts, tokens], left padded."""
        prompts = []
        for episode in self.rows[:: self.num_generations]:
            template = episode.kind.template
            prompts.append(template.encode(template.render(prompt_of(episode.example), add_generation_prompt=True)))
        width, pad = max(map(len, prompts)), self.rows[0].kind.template.tokenizer.pad_token_id or 0
        ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    async def reset(self, row: int, prompt_ids: torch.Tensor | None = None) -> list[int]:
        """Reset a row's environment and give the row's prompt, which takes the place of `prompt_ids`.

        Raises what the environment's `reset` raises.
        """
        return await BACKGROUND.result(self._reset(row))

    async def step(self, row: int, completion_ids: torch.Tensor | Sequence[int]) -> Observation:
        """Answer a turn: run its tool calls, or the environment's step.

        Args:
            completion_ids: int64 [tokens], as sampled, with the end token if there was one.

        Raises:
            Exception: the one that the environment's `step` or `get_reward` raises.
        """
        ids = completion_ids.tolist() if isinstance(completion_ids, torch.Tensor) else list(completion_ids)
        return await BACKGROUND.result(self._step(self.rows[row], ids))

    def rewards(self) -> list[float | None]:
        """Each row's reward: by `get_reward()`, also for rows that a limit ended, or the sum of a StepEnvironment's.

        None for a row without one, and for a row whose environment raised. Raises what `get_reward` raises.
        """
        for episode in self.rows:
            if episode.messages and not episode.failed:
                BACKGROUND.run(self._score(episode))
        return [None if episode.failed else episode.reward for episode in self.rows]

    @property
    def environments(self) -> list[Any]:
        """Each row's environment object, None without a factory: the `environments` of TRL's reward functions."""
        return [episode.environment for episode in self.rows]

    @property
    def completions(self) -> list[Messages]:
        """Each row's messages after its prompt, as far as `step` has seen them."""
        return [episode.messages[episode.num_prompt_messages :] for episode in self.rows]

    def metrics(self) -> dict[str, float]:
        """Of this rank's rows: tool calls a row and the share of them that failed, by TRL's names, and forks a row."""
        calls, failures, forks = (
            sum(getattr(episode, name) for episode in self.rows) for name in ("tool_calls", "tool_failures", "forks")
        )
        return {
            "tools/call_frequency": calls / len(self.rows),
            "tools/failure_frequency": failures / max(calls, 1),
            "environments/forks": forks / len(self.rows),
        }

    async def _reset(self, row: int) -> list[int]:
        """`reset`, in the background loop."""
        last = self.rows[row]
        episode = self.rows[row] = ConversationState(last.kind, last.example, last.environment, last.tools)
        if episode.environment is None:
            return episode.start(None)
        with episode.environment_call():
            text = await call(episode.environment.reset, **episode.example)
        return episode.start(text)

    async def _step(self, episode: ConversationState, ids: list[int]) -> Observation:
        """`step`, in the background loop."""
        text_ids = episode.kind.template.without_end(ids)
        turn, problem = episode.parse(text_ids)
        reply = await self._reply(episode, turn, problem)
        if reply.reward is not None:
            episode.reward = (episode.reward or 0.0) + reply.reward
        observation = None if reply.done else self._observe(episode, turn, reply, ids, text_ids)
        if observation is None:
            episode.messages += [turn, *reply.messages]
            reward = reply.reward if episode.is_stepped else await self._score(episode)
            observation = Observation(reward=reward, done=True)
        return observation

    async def _reply(self, episode: ConversationState, turn: dict[str, Any], problem: str) -> Reply:
        """Return the reply to a turn: tool calls' results, a StepEnvironment's observation, or the episode's end."""
        if problem or "tool_calls" in turn:
            limit = self.settings.max_tool_calling_iterations
            if limit is not None and episode.iterations >= limit:
                return Reply(done=True)
            episode.iterations += 1
            return Reply(await self._tool_messages(episode, turn, problem))
        if episode.is_stepped:
            with episode.environment_call():
                return await episode.environment.step(turn["content"])
        return Reply(done=True)

    async def _tool_messages(self, episode: ConversationState, turn: dict[str, Any], problem: str) -> Messages:
        """Return the results of a turn's tool calls, or the error of a call that cannot be parsed."""
        if problem:
            results = [ToolResult("unknown", error_text(problem), failed=True)]
        else:
            results = await run_calls(turn["tool_calls"], episode.tools, self.settings.tool_timeout_s)
        episode.tool_calls += len(results)
        episode.tool_failures += sum(result.failed for result in results)
        role = {"role": episode.kind.error_role} if problem else {}
        return [{**result.message, **role} for result in results]

    def _observe(
        self, episode: ConversationState, turn: dict[str, Any], reply: Reply, ids: list[int], text_ids: list[int]
    ) -> Observation | None:
        """Return the observation of a reply, whose messages join the conversation; None if it cannot fit the limit.

        ids: the turn as sampled.  text_ids: the same without its end token.
        """
        template, before = episode.kind.template, episode.messages
        last_token = ids[-1] if ids else None
        replies, observation_ids = fitted(
            template, before, turn, reply.messages, last_token, self.settings.max_observation_tokens
        )
        if observation_ids is None:
            return None
        rendered = template.render([*before, turn, *replies], add_generation_prompt=True)
        sampled = template.tokenizer.decode(text_ids)
        is_rewritten = template.is_rewritten(episode.rendered, before, turn, rendered, sampled)
        episode.messages, episode.rendered = [*before, turn, *replies], rendered
        if is_rewritten and self.settings.history == "template":
            episode.forks += 1
            return Observation(reward=reply.reward, prompt_ids=template.encode(rendered))
        if is_rewritten:
            self.settings.on_rewritten_history()
        return Observation(observation_ids, reply.reward)

    async def _score(self, episode: ConversationState) -> float | None:
        """Return the row's reward by its environment's `get_reward`, which is asked once."""
        if not episode.is_scored and hasattr(episode.environment, "get_reward"):
            episode.is_scored = True
            with episode.environment_call():
                reward = await call(episode.environment.get_reward)
            episode.reward = None if reward is None else float(reward)
        return episode.reward


def prompt_of(example: dict[str, Any]) -> Messages:
    """Return a copy of an example's conversation; without one, an empty user message, to which `reset` appends its
    text."""
    return copy.deepcopy(example.get("prompt", [{"role": "user", "content": ""}]))


def with_appended(message: dict[str, Any], text: Any) -> dict[str, Any]:
    """Return a message with what `reset` gave after its content: text, or a list of content parts; None appends
    nothing."""
    if text is None:
        return message
    content = message["content"]
    if isinstance(content, list) and isinstance(text, str):
        text = [{"type": "text", "text": text}]
    elif isinstance(content, str) and isinstance(text, list):
        content = [{"type": "text", "text": content}]
    return {**message, "content": content + text}


def environment_tools(environment: Any) -> list[Callable]:
    """Return the tools of one of TRL's environments: its public methods, except `reset` and `get_reward`."""
    if environment is None or isinstance(environment, StepEnvironment):
        return []
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in NOT_TOOLS and not name.startswith("_")]


def fitted(
    template: ChatTemplate,
    messages: Messages,
    turn: dict[str, Any],
    replies: Messages,
    last_token: int | None,
    max_tokens: int | None,
) -> tuple[Messages, list[int] | None]:
    """Return the replies to a turn, cut to at most `max_tokens` tokens of observation, and the observation's tokens.

    The longest contents are cut, and end with CUT_NOTE. None in the place of the tokens if they do not fit even so.
    """
    ids = template.following_ids(messages, turn, replies, last_token)
    if max_tokens is None or len(ids) <= max_tokens:
        return replies, ids
    contents = [template.encode(reply["content"]) for reply in replies]
    share = fair_share([len(content) for content in contents], max_tokens - len(ids) + sum(map(len, contents)))
    while share >= 0:
        cut = [
            {**reply, "content": cut_text(template, content, share)} if len(content) > share else reply
            for reply, content in zip(replies, contents, strict=True)
        ]
        ids = template.following_ids(messages, turn, cut, last_token)
        if len(ids) <= max_tokens:
            return cut, ids
        share = share - 1 if share <= 0 else max(0, share - max(1, (len(ids) - max_tokens) // len(replies)))
    return replies, None


def fair_share(lengths: list[int], budget: int) -> int:
    """Return the largest n, at least 0, such that the lengths, each cut to n, sum to at most `budget`."""
    for index, length in enumerate(sorted(lengths)):
        share = budget // (len(lengths) - index)
        if length > share:
            return max(share, 0)
        budget -= length
    return max(lengths)


def cut_text(template: ChatTemplate, tokens: list[int], shown: int) -> str:
    """Return the text of the first `shown` tokens, and CUT_NOTE."""
    text = template.tokenizer.decode(tokens[:shown]).rstrip("\ufffd")  # of a character that is cut in two
    return text + CUT_NOTE.format(shown=shown, total=len(tokens))

"""Sessions: the sampled turns of a program that calls the endpoint, as rows of a RolloutBatch."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch

from hybrid.environments.chat_template import Messages
from hybrid.rollout import RolloutBatch
from hybrid.runtime.messages import shortened


@dataclass(frozen=True)
class SampledTurn:
    """One completion of a session.

    prompt_ids, token_ids: as given to the sampler, and as sampled.
    logps: of `token_ids`: sampling, old and raw, as in RolloutBatch.
    message: the assistant message of a chat, as the client got it; {} without one.  prompt: its rendered prompt.
    seconds: the time at which it was requested and that at which it was done, of `time.monotonic`.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logps: tuple[list[float], list[float], list[float]]
    finish_reason: str
    weight_version: int
    sampling_key: tuple[int, int, int]
    seconds: tuple[float, float]
    message: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""


@dataclass
class Session:
    """The turns of one session, in the order in which they were done, and those of chats by their conversation.

    name: of the session.  requests: how many there were of each prompt.
    """

    name: str
    turns: list[SampledTurn] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    by_digest: dict[str, list[SampledTurn]] = field(default_factory=dict)
    reward: float | None = None

    def request_id(self, prompt_ids: list[int]) -> str:
        """Return the id of the next request, from which the sampler takes its key where the request has no seed.

        It depends on the session, the prompt, and how often that was sent: a program that runs again with the engine's
        seed samples the same tokens.
        """
        prompt = hashlib.sha256(str(prompt_ids).encode()).hexdigest()[:16]
        self.requests[prompt] += 1
        return f"{self.name}:{prompt}:{self.requests[prompt]}"

    def turn_of(self, digest: str, message: dict[str, Any]) -> SampledTurn | None:
        """Return the turn that ended a conversation: the one with the message's call ids, else the latest.

        digest: of the conversation up to `message`, an assistant message.
        """
        turns = self.by_digest.get(digest, [])
        named = [turn for turn in turns if call_ids(turn.message) == call_ids(message)]
        return next(reversed(named or turns), None)


@dataclass
class SessionRow:
    """A training row: turns of which each extends the one before.

    ids: prompt and completion so far.  at: where each turn's sampled tokens begin in `ids`.
    """

    ids: list[int] = field(default_factory=list)
    turns: list[SampledTurn] = field(default_factory=list)
    at: list[int] = field(default_factory=list)

    def add(self, turn: SampledTurn) -> None:
        """Append a turn, whose prompt extends the row."""
        self.at.append(len(turn.prompt_ids))
        self.ids = turn.prompt_ids + turn.token_ids
        self.turns.append(turn)


class Sessions:
    """Sessions by name. Threads may share it.

    max_sessions: recorded at once; a further one is refused until others are dropped.
    """

    def __init__(self, max_sessions: int):
        self.max_sessions = max_sessions
        self.by_name: dict[str, Session] = {}
        self.lock = Lock()

    def open(self, name: str) -> Session:
        """Return a session, a new one if it is not there. Raises ValueError if there are too many."""
        with self.lock:
            if name not in self.by_name and len(self.by_name) >= self.max_sessions:
                raise ValueError(
                    f"session: {name!r} given; {self.max_sessions} are recorded already, the most that "
                    "ServerLimits.max_sessions allows; drop those whose rollouts were read"
                )
            return self.by_name.setdefault(name, Session(name))

    def record(self, session: Session, turn: SampledTurn, digest: str) -> None:
        """Add a turn to a session.  digest: of the conversation with the turn's message; "" without messages."""
        with self.lock:
            session.turns.append(turn)
            if digest:
                session.by_digest.setdefault(digest, []).append(turn)

    def reward(self, name: str, value: float) -> None:
        """Set the reward of a session, in the place of an earlier one. Raises ValueError for an unknown session."""
        with self.lock:
            self._known(name).reward = float(value)

    def drop(self, names: str | Sequence[str]) -> None:
        """Forget sessions. Unknown ones are ignored."""
        with self.lock:
            for name in [names] if isinstance(names, str) else names:
                self.by_name.pop(name, None)

    def rollouts(self, names: str | Sequence[str], pad_token_id: int) -> RolloutBatch:
        """Return the rows of sessions, of one after the other. `OpenAIServer.rollouts` has the details."""
        numbered = list(enumerate([names] if isinstance(names, str) else names))
        with self.lock:
            found = [(number, name, self._known(name)) for number, name in numbered]
            turns = [(number, session.reward, list(session.turns)) for number, _, session in found]
            if empty := [name for _, name, session in found if not session.turns]:
                raise ValueError(f"sessions: {shortened(empty)} have no finished completion; wait for one")
        rows = [(number, reward, row) for number, reward, all_turns in turns for row in rows_of(all_turns)]
        return batch_of(rows, pad_token_id)

    def _known(self, name: str) -> Session:
        """Return a session. Raises ValueError if there is none of that name."""
        if name not in self.by_name:
            raise ValueError(f"session: {name!r} given; recorded are {shortened(self.by_name) or 'none'}")
        return self.by_name[name]


def rows_of(turns: Sequence[SampledTurn]) -> list[SessionRow]:
    """Return the training rows of a session's turns.

    A turn whose prompt extends a row, token by token, joins it; the longest, if several. Any other begins a row, whose
    prompt is the turn's: tokens that it shares with other rows are sampled tokens of the first alone.
    """
    rows: list[SessionRow] = []
    for turn in turns:
        extended = [row for row in rows if turn.prompt_ids[: len(row.ids)] == row.ids]
        if not extended:
            rows.append(row := SessionRow())
            extended = [row]
        max(extended, key=lambda row: len(row.ids)).add(turn)
    return rows


def batch_of(rows: Sequence[tuple[int, float | None, SessionRow]], pad_token_id: int) -> RolloutBatch:
    """Return rows as a batch on the CPU. A row comes with the number of its session and its reward."""
    batches = []
    for number, reward, row in rows:
        start = row.at[0]
        width = len(row.ids) - start
        mask, turn_ids, versions = (torch.full((1, width), fill) for fill in (0, -1, 0))
        logps = torch.zeros(3, 1, width)
        for index, (turn, at) in enumerate(zip(row.turns, row.at, strict=True)):
            begin, end = at - start, at - start + len(turn.token_ids)
            mask[0, begin:end], versions[0, begin:end] = 1, turn.weight_version
            turn_ids[0, begin:] = index  # and of its observation
            logps[:, 0, begin:end] = torch.tensor(turn.logps)
        sampling, old, raw = logps
        waits = [b.seconds[0] - a.seconds[1] for a, b in zip(row.turns, row.turns[1:], strict=False)]
        batches.append(
            RolloutBatch(
                prompt_ids=torch.tensor([row.ids[:start]]),
                prompt_mask=torch.ones(1, start, dtype=torch.int64),
                completion_ids=torch.tensor([row.ids[start:]]),
                completion_mask=mask,
                sampling_per_token_logps=sampling,
                old_per_token_logps=old,
                raw_per_token_logps=raw,
                finish_reason=[row.turns[-1].finish_reason],
                weight_version=max(turn.weight_version for turn in row.turns),
                row_index=torch.tensor([number]),
                weight_versions=versions,
                observation_mask=1 - mask,
                turn_ids=turn_ids,
                turn_rewards=[[*[None] * (len(row.turns) - 1), reward]],
                turn_seconds=[[*waits, 0.0]],
                errors=[""],
            )
        )
    latest = max(batch.weight_version for batch in batches)
    return replace(RolloutBatch.cat(batches, pad_token_id), weight_version=latest)


def digests(messages: Messages, *context: Any) -> list[str]:
    """Return a digest of the conversation up to each message.  context: what the messages are rendered with.

    Reasoning, ids of calls and white space around a text do not count: clients leave them out or change them.
    """
    chain, results = hashlib.sha256(json.dumps(context, sort_keys=True, default=str).encode()), []
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        content = content.strip() if message["role"] == "assistant" else content
        fields = [message["role"], content, calls, message.get("name"), message.get("tool_call_id")]
        chain.update(json.dumps(fields, sort_keys=True, default=str).encode("utf-8", "replace"))
        results.append(chain.hexdigest())
    return results


def call_ids(message: dict[str, Any]) -> list[Any]:
    """Return the ids of a message's tool calls."""
    return [call.get("id") for call in message.get("tool_calls") or []]

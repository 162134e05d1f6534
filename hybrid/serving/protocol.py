"""OpenAI's requests and errors: what a request may say, checked, and its sampling settings."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hybrid.sampling.params import MAX_COUNT, SamplingParams

MAX_SAMPLES, MAX_STOPS, MAX_TOP_LOGPROBS, SHOWN = 128, 16, 20, 200
# Fields that this server cannot honour: the values that mean "off", and the reason.
UNAVAILABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "constrained decoding is not available; ask for the format in the prompt"),
    "frequency_penalty": ((0,), "use repetition_penalty"),
    "presence_penalty": ((0,), "use repetition_penalty"),
    "parallel_tool_calls": ((True,), "the number of calls in a turn cannot be enforced"),
    "best_of": ((1,), "use n, and choose by the logprobs"),
    "suffix": (("",), "the model only continues text"),
    "use_beam_search": ((False,), "beam search is not available"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tools"),
    "reasoning_effort": ((), "use chat_template_kwargs"),
    "modalities": ((["text"],), "the model writes text"),
    "store": ((False,), "completions are not stored; a session records its turns"),
}
PARAMS = {"min_tokens": "min_new_tokens"}  # names of SamplingParams that are not the request's
WITHOUT_EFFECT = ("metadata", "service_tier", "safety_identifier", "prompt_cache_key")


class ApiError(Exception):
    """An error that a client gets as OpenAI's JSON.  status: of HTTP.  param: the field that is wrong."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_list(value: Any) -> Any:
    """Return a text in a list, as `stop` may be either."""
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list), Field(max_length=MAX_STOPS)]


class StreamOptions(BaseModel):
    """Options of `stream`.  include_usage: a last chunk has the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationRequest(BaseModel):
    """The fields that chats and plain completions share: OpenAI's, vLLM's of the same names, and `session`.

    session: records the request for `OpenAIServer.rollouts`.  user: shares the server fairly with other users.
    return_token_ids: adds `prompt_token_ids` and `token_ids`.  return_tokens_as_token_ids: logprobs show "token_id:7".
    top_logprobs: so many most probable tokens, under the model's logits, and the token itself.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Stops = []
    stop_token_ids: list[int] = []
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    session: Annotated[str, Field(max_length=SHOWN)] = ""
    priority: int = 0
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def without_defaults(cls, values: Any) -> Any:
        """Drop fields that are null or have no effect; refuse those that cannot be honoured."""
        if not isinstance(values, dict):
            return values
        for name, (allowed, reason) in UNAVAILABLE.items():
            value = values.get(name)
            if value is not None and name not in cls.model_fields and value not in allowed:
                shown = ", ".join([*map(repr, allowed), "left out"])
                raise ApiError(f"{name}: {shortened(value)} given; it must be {shown}: {reason}", param=name)
        dropped = {*UNAVAILABLE, *WITHOUT_EFFECT} - cls.model_fields.keys()
        return {name: value for name, value in values.items() if value is not None and name not in dropped}

    @property
    def wants_scores(self) -> bool:
        """Whether tokens are to be scored after they have been sampled."""
        return self.logprobs and self.top_logprobs > 0

    @model_validator(mode="after")
    def consistent(self) -> "GenerationRequest":
        """Refuse fields that do not go together."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(f"top_logprobs: {self.top_logprobs} given without logprobs=true", param="top_logprobs")
        if self.stream and self.wants_scores:
            raise ApiError(
                "stream: true given with the logprobs of other tokens, which are computed after the last token; leave "
                "one of them out",
                param="stream",
            )
        return self

    def sampling(
        self, defaults: SamplingParams, max_new_tokens: int, stop_token_ids: tuple[int, ...] = ()
    ) -> SamplingParams:
        """Return the sampling settings: the request's, and `defaults` for those that it leaves out.

        stop_token_ids: in addition to both. Raises ApiError for values that SamplingParams refuses.
        """
        names = {name: PARAMS.get(name, name) for name in self.model_fields_set}
        given = {field: getattr(self, name) for name, field in names.items() if hasattr(defaults, field)}
        stops = tuple(dict.fromkeys((*self.stop_token_ids, *defaults.stop_token_ids, *stop_token_ids)))
        given |= {"max_new_tokens": max_new_tokens, "stop_token_ids": stops}
        given["top_k"] = max(given.get("top_k", defaults.top_k), 0)  # vLLM's -1 is off
        try:
            return replace(defaults, **given)
        except ValueError as error:
            raise ApiError(str(error).replace("SamplingParams.", "")) from error

    def allowed_tokens(self, name: str, given: int | None, default: int | None, prompt: int, longest: int) -> int:
        """Return the most new tokens: `given`, else `default`, else as many as the context has room for.

        Raises ApiError if the context has not so much room.

        Args:
            name: of the field `given`.
            prompt: tokens of the prompt.
            longest: tokens of prompt and completion.
        """
        left = longest - prompt
        tokens = min(left if default is None else default, left) if given is None else given
        if left < 1 or tokens > left:
            wrong = f"{name}: {tokens} given" if left > 0 else f"a prompt of {prompt} tokens given"
            raise ApiError(
                f"{wrong}; the context is of {longest} tokens, with room for {max(left, 0)} after this prompt",
                param=name,
                code="context_length_exceeded",
            )
        return tokens


class ChatRequest(GenerationRequest):
    """A request of /v1/chat/completions. With tool_choice "none" tools are described to the model, and no call is
    parsed."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(GenerationRequest):
    """A request of /v1/completions.

    prompt: text, token ids, or a list of either.
    max_tokens: 0 with `echo` returns the prompt.
    logprobs: of the tokens, with `echo` also of the prompt's, under the model's logits; and of so many most probable
        ones at each place. True is 0.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    echo: bool = False

    @model_validator(mode="before")
    @classmethod
    def with_top_logprobs(cls, values: Any) -> Any:
        """Read a number of logprobs as `top_logprobs`, as chats have it."""
        number = values.get("logprobs") if isinstance(values, dict) else None
        if not isinstance(number, int) or isinstance(number, bool):
            return values
        if not 0 <= number <= MAX_TOP_LOGPROBS:
            raise ApiError(f"logprobs: {number} given; it must be from 0 to {MAX_TOP_LOGPROBS}", param="logprobs")
        return {**values, "logprobs": True, "top_logprobs": number}

    @property
    def wants_scores(self) -> bool:
        """Whether tokens are to be scored after they have been sampled."""
        return self.logprobs and (self.echo or self.top_logprobs > 0)

    @model_validator(mode="after")
    def samples_or_echoes(self) -> "CompletionRequest":
        """Refuse a request without a result."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens: 0 given without echo=true; it must be at least 1", param="max_tokens")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt. Raises ApiError for an empty one."""
        given: Any = self.prompt
        many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if many else [given]
        if not all(prompts):
            raise ApiError("prompt: an empty one given; it must have a token", param="prompt")
        return prompts


def shortened(value: Any) -> str:
    """Return the begin of a value as text."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def checked(kind: type[GenerationRequest], content: Any) -> Any:
    """Return a request of `kind`. Raises ApiError with the field, what was given and what is allowed."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "the body"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(sorted(kind.model_fields))
            raise ApiError(f"{name}: unknown; a request may have {allowed}", param=name) from error
        given = "nothing" if first["type"] == "missing" else shortened(first["input"])
        raise ApiError(f"{name}: {given} given; {first['msg']}", param=name) from error

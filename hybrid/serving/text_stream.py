"""The text of a completion as its tokens arrive, up to the first stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # decoded from a character whose last bytes are in later tokens
MAX_HELD_TOKENS = 64  # of an unfinished character; random weights write such bytes without end


class TextStream:
    """Decodes one completion piece by piece.

    ids: the tokens so far; after a stop string, up to the token that completed it.
    text: the decoded text so far, cut before the stop string.  stopped: whether a stop string was found.

    Args:
        tokenizer: of the model.
        stop: texts that end the completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids: list[int] = []
        self.text, self.stopped = "", False
        self.returned = 0  # characters of `text` that `push` has returned
        self.begin = self.read = 0  # ids[begin:read] are decoded again with what follows: white space depends on it
        self.context = ""  # their text

    def push(self, ids: Sequence[int], finish_reason: str | None = None) -> str:
        """Return the further text that is final: without the begin of a stop string or of an unfinished character.

        Args:
            ids: the next tokens; those after a stop string are dropped.
            finish_reason: of the completion, with its last tokens. After "stop" the last token is no text.
        """
        if self.stopped:
            return ""
        text_ids = ids[:-1] if finish_reason == "stop" else ids
        for piece in [[token] for token in text_ids] if self.stop else [list(text_ids)]:
            self.ids += piece
            self._decode()
            if self.stopped:
                break
        else:
            if finish_reason is not None:
                self._decode(is_last=True)
            self.ids += ids[len(text_ids) :]
        held = 0 if self.stopped or finish_reason is not None else self._begun_stop()
        new = self.text[self.returned : len(self.text) - held]
        self.returned += len(new)
        return new

    def _decode(self, is_last: bool = False) -> None:
        """Append the text of the new tokens, and look for stop strings in it."""
        decoded = self._text_of(self.begin)[len(self.context) :]
        if decoded.endswith(UNFINISHED) and not is_last and len(self.ids) - self.read < MAX_HELD_TOKENS:
            return
        begin = max(0, len(self.text) - max(map(len, self.stop), default=0) + 1)
        self.text += decoded
        self.begin, self.read = self.read, len(self.ids)
        self.context = self._text_of(self.begin)
        found = [at for stop in self.stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _text_of(self, begin: int) -> str:
        """Return the text of the tokens from `begin` on."""
        return self.tokenizer.decode(self.ids[begin:], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _begun_stop(self) -> int:
        """Return how many characters at the text's end may be the begin of a stop string."""
        lengths = (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(lengths, default=0)

"""The reward `judge`: questions to an OpenAI endpoint, scores from its answers, errors and retries."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from rlhf_examples import rewards
from tests.rlhf_examples.test_reward_server import PROXIES, served

SETTINGS = {
    "model": "a-judge",
    "prompt": "Question: {prompt} Reference: {answer} Answer: {completion} {{Score}}",
    "score": r"Score:\s*(-?[\d.]+)",
    "divide_by": 10,
    "system": "Be strict.",
    "api_key_env": "JUDGE_KEY",
    "request": {"reasoning_effort": "low"},
    "concurrency": 2,
}


class Judge(BaseHTTPRequestHandler):
    """Answers with what the completion says; a status of the server's list fails the request first."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, self.headers["Authorization"], body))
            status = self.server.statuses.pop(0) if self.server.statuses else 200
        text = body["messages"][-1]["content"].partition("Answer: ")[2].removesuffix(" {Score}")
        answer = {"choices": [{"message": {"role": "assistant", "content": text or None}}]}
        content = json.dumps({} if text == "other form" else answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setattr(rewards, "FIRST_RETRY_DELAY_S", 0.001)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.lock, server.requests, server.statuses = threading.Lock(), [], []
    with served(server):
        yield server


def judge_of(endpoint, folder, **settings):
    file = folder / "judge.yaml"
    given = {**SETTINGS, "url": f"http://127.0.0.1:{endpoint.server_port}/v1/", **settings}
    file.write_text(yaml.safe_dump({name: value for name, value in given.items() if value is not None}))
    return {"judge": rewards.load_reward(f"judge:{file}")}


def scores_of(judge, completions: list[str]) -> list[float]:
    count = len(completions)
    return rewards.score_all(judge, ["2 + 2 {?}"] * count, completions, {"answer": [4] * count})["judge"]


def test_scores_are_read_from_answers(endpoint, tmp_path, monkeypatch):
    for name, value in PROXIES.items():  # an endpoint on this machine needs none
        monkeypatch.setenv(name, value)
    judge = judge_of(endpoint, tmp_path)
    completions = ["Score: 2, no: Score: 7", "Score: -5", "Score: ...", "no number", ""]
    scores = scores_of(judge, completions)
    assert scores[:2] == [0.7, -0.5] and all(map(math.isnan, scores[2:]))
    path, key, body = next(request for request in endpoint.requests if "Score: 7" in str(request))
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    question = "Question: 2 + 2 {?} Reference: 4 Answer: Score: 2, no: Score: 7 {Score}"
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": question}]
    expected = {"model": "a-judge", "messages": messages, "temperature": 0.0, "max_tokens": 512}
    assert body == {**expected, "reasoning_effort": "low"}


def test_the_score_is_the_last_number_by_default(endpoint, tmp_path):
    judge = judge_of(endpoint, tmp_path, score=None, divide_by=None)
    assert scores_of(judge, ["From 0 to 10: 7.5."]) == [7.5]


def test_a_failed_request_is_repeated_alone(endpoint, tmp_path):
    endpoint.statuses = [503, 429]
    judge = judge_of(endpoint, tmp_path, concurrency=1)
    assert scores_of(judge, ["Score: 1", "Score: 2"]) == [0.1, 0.2]
    assert len(endpoint.requests) == 4
    endpoint.statuses = [500] * 3
    with pytest.raises(RuntimeError, match="reward: judge failed .*, after 2 retries"):
        scores_of(judge, ["Score: 1"])


def test_a_rejected_request_and_another_form_are_errors(endpoint, tmp_path):
    judge = judge_of(endpoint, tmp_path)
    endpoint.statuses = [401]
    with pytest.raises(ValueError, match="rejected the request: 401"):
        scores_of(judge, ["Score: 1"])
    with pytest.raises(ValueError, match="must return OpenAI's chat completion"):
        scores_of(judge, ["other form"])
    with pytest.raises(ValueError, match="needs the column 'answer', which some records lack"):
        rewards.score_all(judge, ["a"], ["b"], {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ""}, "url: none given; a judge needs url, model and prompt"),
        ({"score": "("}, "it must be a regular expression"),
        ({"score": r"\d+"}, "it must have a group, which is the number"),
        ({"prompt": "Rate it."}, r"it must contain \{completion\}"),
        ({"prompt": "{completion} {"}, "write braces as {{ and }}"),
        ({"prompt": '{completion} {"a": 1}'}, "it must be a column's name"),
        ({"divide_by": 0}, "divide_by: 0 given; it must be another number"),
        ({"api_key_env": "NO_SUCH_KEY"}, "there is no such environment variable"),
        ({"request": "[1]"}, "it must be a JSON object"),
        ({"scores": 1}, "scores"),
    ],
)
def test_settings_are_checked(endpoint, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        judge_of(endpoint, tmp_path, **settings)
    with pytest.raises(ValueError, match=r"'judge' given; it must be judge:FILE.yaml"):
        rewards.load_reward("judge")

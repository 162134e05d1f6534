"""A harness for verifiers: a program of two turns with the openai package, and a task with a reward."""

import openai
import verifiers.v1 as vf
from verifiers.v1.types import content_text

__all__ = ["ProgramHarness"]


class ProgramHarness(vf.Harness[vf.HarnessConfig]):
    """Runs the program in this process, against the endpoint that verifiers listens at."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                content = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class LengthTask(vf.Task[vf.TaskData]):
    """Rewards the characters of the last answer."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(content_text(trace.messages[-1].content)))

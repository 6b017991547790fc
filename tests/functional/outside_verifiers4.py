"""A task of verifiers 0.4 as its user wrote it, started as a program.

Its training client renders messages itself and asks for tokens by vLLM's route. The harness, the
program that plays the task, runs here: verifiers starts others with uv.
"""

import asyncio
import json
import os
import sys
from typing import ClassVar

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers.configs import DefaultRendererConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

__all__ = ["Talk"]


class Talk(vf.Harness[HarnessConfig]):
    """Three turns, through the address that verifiers gives it."""

    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [message.model_dump(exclude_none=True) for message in data.prompt]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        for _ in range(3):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            text = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "More."},
            ]
        return ProgramResult(0, "", "")


class Count(vf.Task):
    @vf.reward
    async def written(self, trace):
        return float(sum(len(message.content) for message in trace.assistant_messages))


async def main():
    row = json.loads(sys.stdin.readline())
    config = vf.AgentConfig(
        harness=HarnessConfig(id="outside_verifiers4"), runtime=SubprocessConfig(), model="policy",
        client=vf.TrainClientConfig(
            base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY",
            renderer=DefaultRendererConfig(), renderer_model_name=row["model"],
        ),
    )  # fmt: skip
    trace = await vf.make_agent(config).run(Count(vf.TaskData(prompt=row["prompt"])))
    if not trace.ok:
        sys.exit(" ".join(f"{error.type}: {error.message}" for error in trace.errors))
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main())

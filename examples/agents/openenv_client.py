"""Let the policy talk to an OpenEnv server: the program of an AgentCommand (docs/agents.md)."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from openenv.core import GenericEnvClient


async def main():
    row, reward = json.loads(sys.stdin.readline()), 0.0
    messages = row["prompt"]  # what the environment shows first
    async with GenericEnvClient(base_url="http://localhost:8000") as environment:
        result = await environment.reset(seed=row["seed"])
        while not result.done:
            answer = await AsyncOpenAI().chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content
            result = await environment.step({"message": text})
            reward += result.reward or 0.0
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": result.observation["text"]},
            ]
    print(reward)


asyncio.run(main())

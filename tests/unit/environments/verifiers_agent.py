"""An environment of verifiers 0.1.x as a user has it, run once; imports nothing of this package."""

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def text(message):
    content = message["content"] if isinstance(message, dict) else message.content
    return content or ""


class GuessTheNumber(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess, secret = int(text(messages[-1])), int(state["answer"])
        if guess == secret:
            state["final_env_response"] = [{"role": "user", "content": "found"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < secret else "lower"}]


def found(completion, answer, **kwargs) -> float:
    return float(any(text(message) == answer for message in completion))


async def main():
    row = json.loads(sys.stdin.readline())
    example = {"prompt": row["prompt"], "answer": str(row["secret"])}
    environment = GuessTheNumber(
        dataset=Dataset.from_list([example]), rubric=vf.Rubric(funcs=[found]), max_turns=4
    )
    config = ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0
    )
    given = dict(environment.get_dataset()[0])
    output = await environment.run_rollout(given, config, "policy", {"temperature": 1.0})
    if output.get("error"):
        raise RuntimeError(output["error"])
    return output["reward"]


if __name__ == "__main__":
    print(asyncio.run(main()))

"""An environment of verifiers as its user wrote it, started as a program; needs verifiers 0.1."""

import asyncio
import json
import os
import sys


def build(row):
    import verifiers
    from datasets import Dataset

    class Guess(verifiers.MultiTurnEnv):
        async def env_response(self, messages, state, **further):
            if content(messages[-1]) == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "yes"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "no"}]

    def found(completion, answer, **further):
        return float(answer in map(content, completion))

    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]}])
    return Guess(dataset=data, rubric=verifiers.Rubric(funcs=[found]), max_turns=4)


def content(message):
    return message["content"] if isinstance(message, dict) else message.content


async def main():
    from verifiers.types import ClientConfig

    environment = build(json.loads(sys.stdin.readline()))
    client = ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0
    )
    row = dict(environment.get_dataset()[0])
    result = await environment.run_rollout(row, client, "policy", {"temperature": 1.0})
    if result.get("error"):
        sys.exit(str(result["error"]))
    print(result["reward"])


if __name__ == "__main__":
    asyncio.run(main())

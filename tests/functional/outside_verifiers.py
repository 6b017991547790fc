"""An environment of the library verifiers as its user wrote it, started as a program."""

import asyncio
import json
import os
import sys


def build(row):
    import verifiers
    from datasets import Dataset

    class Talk(verifiers.MultiTurnEnv):
        async def env_response(self, messages, state, **further):
            return [{"role": "user", "content": "More."}]

    def written(completion, **further):
        return float(sum(map(count, completion)))

    data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]}])
    return Talk(dataset=data, rubric=verifiers.Rubric(funcs=[written]), max_turns=3)


def count(message):
    message = message if isinstance(message, dict) else message.model_dump()
    return len(message["content"]) if message["role"] == "assistant" else 0


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

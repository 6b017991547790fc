"""Agents that read the policy's tokens over HTTP, and write down each reply."""

import json
from pathlib import Path

import httpx

from megatron_rl.environments import AgentEnvironment

TURNS = 3


class Tokens(AgentEnvironment):
    """Sends token ids to vLLM's route; the row has the prompt's, and those of every observation."""

    async def run(self, url):
        replies, prompt = [], self.row["token_ids"]
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            for _ in range(TURNS):
                body = {"token_ids": prompt, "sampling_params": {"logprobs": 1, "n": 1}}
                address = f"{url.removesuffix('/v1')}/inference/v1/generate"
                replies.append((await client.post(address, json=body)).raise_for_status().json())
                sampled = replies[-1]["choices"][0]["token_ids"]
                after = self.row[
                    "observation"
                ]  # the policy may have sampled the end of turn itself
                prompt = prompt + sampled + after[sampled[-1] == after[0] :]
        with (Path(self.row["folder"]) / "tokens").open("a") as file:
            file.write(json.dumps([self.row["token_ids"], replies]) + "\n")
        return float(len(sampled))


class Messages(AgentEnvironment):
    """Sends messages, and the settings with which NeMo-Gym's model server asks for tokens."""

    async def run(self, url):
        replies, messages = [], list(self.row["prompt"])
        asking = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            for _ in range(TURNS):
                body = {"messages": messages, "return_token_ids": True, **asking}
                reply = await client.post(f"{url}/chat/completions", json=body)
                replies.append(reply.raise_for_status().json())
                # NeMo-Gym sends a message back with its token fields
                messages += [
                    replies[-1]["choices"][0]["message"],
                    {"role": "user", "content": "go"},
                ]
        with (Path(self.row["folder"]) / "messages").open("a") as file:
            file.write(json.dumps([self.row["token_ids"], replies]) + "\n")
        return float(len(replies[-1]["choices"][0]["token_ids"]))


class Foreign(AgentEnvironment):
    """Continues with a token of another model."""

    async def run(self, url):
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            address, prompt = (
                f"{url.removesuffix('/v1')}/inference/v1/generate",
                self.row["token_ids"],
            )
            reply = (await client.post(address, json={"token_ids": prompt})).json()
            prompt = prompt + reply["choices"][0]["token_ids"] + [100_000]
            await client.post(address, json={"token_ids": prompt})

"""An agent for tests, in a module of its own: its import of httpx is paid for once, before the
forks for conversations. OpenAI's client takes longer to import, and to make, than a run.
"""

import json
from pathlib import Path

import httpx

from megatron_rl.environments import AgentEnvironment


class Forgetful(AgentEnvironment):
    """An agent by OpenAI's protocol, as its user wrote it: its history is not what was written.

    It strips thinking, here all but the last two characters, from each of its turns; with a row
    that is `flat` it replaces the conversation by a summary once. It writes its requests to a file.
    """

    prompt = "question"

    async def run(self, url):
        seen, compacts = [], self.row["flat"]
        messages = [{"role": "user", "content": self.row["question"]}]
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            for turn in range(3):
                seen.append(list(messages))
                body = {"model": "policy", "messages": messages}
                reply = await client.post(f"{url}/chat/completions", json=body)
                text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
                if compacts and turn == 1:
                    summary = f"{turn + 1} turns, last {text[-2:]}"
                    messages = [{"role": "system", "content": summary}]
                else:
                    written = text if compacts else text[-2:]
                    messages.append({"role": "assistant", "content": written})
                messages.append({"role": "user", "content": "more"})
        with (Path(self.row["folder"]) / "requests").open("a") as file:
            file.write(json.dumps([seen, text]) + "\n")
        return float(sum(map(ord, text)) % 2)  # differs within a group

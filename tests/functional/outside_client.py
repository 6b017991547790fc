"""An agent as its user wrote it: OpenAI's client, and a row on standard input."""

import json
import sys

from openai import OpenAI


def main():
    messages = json.loads(sys.stdin.readline())["prompt"]
    written = 0
    for _ in range(3):
        answer = OpenAI().chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        written += len(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    return float(written)


if __name__ == "__main__":
    print("starting")
    print(main())

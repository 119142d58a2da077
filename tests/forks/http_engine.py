"""Responses from an inference engine behind HTTP. It needs the weights before each rollout."""
import io
import json
import urllib.request

import torch


def engine_at(url):
    """A `rollout` that sends the weights to the engine, and then asks it for responses."""

    def post(path, data):
        with urllib.request.urlopen(f"{url}/{path}", data) as answer:
            return answer.read()

    def rollout(model, prompts, group_size, max_length, temperature, end_ids):
        weights = io.BytesIO()
        torch.save(model.state_dict(), weights)
        post("weights", weights.getvalue())
        asked = {"prompts": prompts, "n": group_size, "max_length": max_length,
                 "temperature": temperature, "end_ids": end_ids.tolist()}
        answer = json.loads(post("sample", json.dumps(asked).encode()))
        log_probs = torch.zeros(len(answer["responses"]), max_length, device=model.device)
        for row, values in zip(log_probs, answer["log_probs"]):
            row[:len(values)] = torch.tensor(values)
        return answer["responses"], log_probs

    return rollout

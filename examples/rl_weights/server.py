"""A small server that generates with the newest weights of a trainer, which come through `shardkit.weights`.

    python examples/rl_weights/server.py --weights tcp://127.0.0.1:29650 --port 29660

It holds a plain model of transformers. The trainer may start before or after it, end, and start again. A request is a
POST of JSON with prompts as lists of token ids:

    curl -d '{"prompts": [[3], [5, 7]], "tokens": 6}' http://127.0.0.1:29660

One thread does everything: between two requests it takes the version that the trainer has ready. So no completion is
made with parts of two versions. The answer names the version.
"""

import argparse
import contextlib
import json
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardkit.weights import SendersClosed, WeightReceiver, targets_of

MODEL = Path(__file__).with_name("model.json")
POLL = 0.01  # seconds that a version may wait while there are no requests


def make_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of the trainer and of the server, with random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=dtype)


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompts: list[list[int]], tokens: int, seed: int = 0, stop: list[int] | None = None
) -> dict[str, Any]:
    """Samples a completion of each prompt, and tells the log-probability of each of its tokens."""
    torch.manual_seed(seed)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    made = model.generate(
        padded, attention_mask=mask, max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=stop, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    scores = model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True).tolist()
    completions = made.sequences[:, width:].tolist()
    ends = [next((at for at, token in enumerate(one, 1) if token in (stop or ())), len(one)) for one in completions]
    return {
        "completions": [one[:end] for one, end in zip(completions, ends, strict=True)],
        "logprobs": [one[:end] for one, end in zip(scores, ends, strict=True)],
    }


def complete(url: str, **request: Any) -> dict[str, Any]:
    """Asks a server: the arguments of `generate` but the model; returns what it returns, and the version."""
    with urllib.request.urlopen(url, json.dumps(request).encode()) as answer:
        return json.load(answer)


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="tcp://127.0.0.1:29650", help="where the trainer sends weights from")
    parser.add_argument("--port", type=int, default=29660, help="where this server listens")
    options = parser.parse_args()
    model = make_model(torch.bfloat16).eval()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = {"version": receiver.version, **generate(model, **request)}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing of each request."""

    with (
        contextlib.suppress(KeyboardInterrupt),
        HTTPServer(("127.0.0.1", options.port), Handler) as server,
        WeightReceiver(options.weights, targets_of(model.state_dict())) as receiver,
    ):
        server.timeout = POLL
        while True:
            if receiver.offered:
                with contextlib.suppress(SendersClosed, TimeoutError):  # the trainer may end just now
                    print(f"version {receiver.receive()}", flush=True)
            server.handle_request()


if __name__ == "__main__":
    main()

"""A server with a real worker of this package, and no engine: transformers computes what it answers, token by token.

    python plain_engine.py ADDRESS PORT SEED SILENT_S

It speaks the routes of `vllm serve` that `VllmSync` calls, and starts with weights of its own (drawn from SEED), as a
server that is started anew comes with those of its checkpoint. SILENT_S is as of tcp_link.py. It starts in seconds, so
that several fit in a test.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import policies
import torch
from torch import Tensor, nn

from lora_merge.engine.state import State
from lora_merge.engine.transport import tcp_link
from lora_merge.engine.worker import commands
from lora_merge.engine.worker.loader import Loader
from lora_merge.engine.worker.modules import Modules
from lora_merge.engine.worker.rpc import respond
from lora_merge.engine.worker.session import WorkerSession, session_of

CPU = torch.device("cpu")
TOKENS = 10


class PlainWorker:
    """Implements `Worker`: one process, one worker."""

    rank, device = 0, CPU

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def session(self) -> WorkerSession:
        return session_of(self.model, lambda: WorkerSession(Loader(Modules(self.model), CPU), lambda: 0, lambda: False))

    def stepped(self) -> int:
        return self.steps

    def working(self, op: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def about(self, session: WorkerSession) -> dict[str, Any]:
        one = {"world": 1, "launcher": False, "unfit": "", "dtype": "float32", "lora": None}
        return {**one, "connector": "", "multimodal": False}

    def served(self, session: WorkerSession, state: State) -> State:
        return state

    def settle(self, session: WorkerSession, weights: bool) -> None: ...


class Engine:
    """What the routes do."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model: Any = policies.qwen2().eval()
        known = dict(model.named_parameters())

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded = set()
            for name, tensor in weights:
                if name in known:
                    known[name].data.copy_(tensor)
                    loaded.add(name)
            return loaded

        model.load_weights = load_weights
        self.model, self.worker = model, PlainWorker(model)
        self._runs, self._step = threading.Event(), threading.Lock()
        self._runs.set()

    def collective_rpc(self, body: Any, query: Any) -> Any:
        return {"results": [respond(self.worker, commands.OPERATIONS, body["args"][0])]}  # type: ignore[arg-type]

    def is_paused(self, body: Any, query: Any) -> Any:
        return {"is_paused": not self._runs.is_set()}

    def pause(self, body: Any, query: Any) -> Any:
        self._runs.clear()
        with self._step:  # the one that is under way
            return {"status": "paused"}

    def resume(self, body: Any, query: Any) -> Any:
        self._runs.set()
        return {"status": "resumed"}

    def update_weight_version(self, body: Any, query: Any) -> Any:
        return {"success": True, "new_version": body["new_version"]}

    def reset_prefix_cache(self, body: Any, query: Any) -> Any:
        return {"success": True}

    def health(self, body: Any, query: Any) -> Any:
        return {}

    def answer(self, body: Any, query: Any) -> Any:
        ids = list(body)
        with torch.no_grad():
            for _ in range(TOKENS):
                self._runs.wait()
                with self._step:
                    self.worker.steps += 1
                    ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return {"tokens": ids[len(body) :]}


def serve(address: str, port: int, seed: int) -> None:
    engine = Engine(seed)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            route = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            said = getattr(engine, route.path.strip("/"))(json.loads(data or "null"), parse_qs(route.query))
            text = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    ThreadingHTTPServer((address, port), Handler).serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tcp_link.SILENT_S = int(sys.argv[4])
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

#!/usr/bin/env python3
"""A real `vllm serve`, as an operator starts it: pictures over HTTP, `/metrics`, its orderly end.

    python benchmarks/vllm_server.py --out DIR [--runner v1|v2] [--api-servers N]

Two servers, one after the other, with a full-size Qwen3-VL tower (seeded random weights, a text
model of four layers): one with `cudagraph_mm_encoder`, one without, in which an installed graphhal
must not show. Prints a table and ends with 0 only if every line is right. The weights come through
vLLM's developer mode, which is not for production.
"""

import argparse
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import vllm_engine as engine

HERE = Path(__file__).resolve().parent
START_SECONDS, END_SECONDS = 240, 60
LARGEST = 1024
"""Tokens of the largest graph; a picture of more is sent once."""
TOKENS = 8
MODEL = "tower"
REASON = re.compile(r'reason="([^"]*)"')
TOO_LARGE = "more rows than the largest graph"


class Weights:
    """What the worker gains, for the developer mode to call."""

    def seeded_weights(self) -> None:
        """Fill the model, in place."""
        engine.refill(self)


class Server:
    """One `vllm serve` and its log."""

    def __init__(self, args: argparse.Namespace, graphs: bool) -> None:
        self.folder = Path(args.out) / ("graphhal" if graphs else "plain")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        own = {"max_tokens": LARGEST, "stats_file": str(self.folder / "stats-{pid}.json")}
        switched = [
            "--compilation-config", json.dumps(compilation | {"cudagraph_mm_encoder": True}),
            "--additional-config", json.dumps({"graphhal": own}),
        ] if graphs else ["--compilation-config", json.dumps(compilation)]  # fmt: skip
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", args.model,
            "--port", str(self.port), "--api-server-count", str(args.api_servers),
            "--served-model-name", MODEL,
            "--load-format", "dummy", "--max-model-len", "8192", "--max-num-seqs", "8",
            "--gpu-memory-utilization", "0.25", "--limit-mm-per-prompt", '{"image": 1, "video": 0}',
            "--worker-extension-cls", "vllm_server.Weights", *switched,
        ]  # fmt: skip
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if args.runner == "v2" else "0",
        }
        if args.api_servers == 1:
            environment["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
        self.started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def wait(self) -> float:
        """Seconds until it serves; an error with the end of its log where it does not."""
        while self.process.poll() is None:
            if time.perf_counter() - self.started > START_SECONDS:
                break
            try:
                with urllib.request.urlopen(self.url("/health"), timeout=5):
                    return time.perf_counter() - self.started
            except OSError:
                time.sleep(0.5)
        raise RuntimeError("the server did not start:\n" + self.log.read_text()[-6000:])

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url(path), data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def ask(self, picture: bytes, number: int = 0) -> tuple[int, dict[str, Any]]:
        """One chat request about a picture, as any client sends it."""
        url = "data:image/png;base64," + base64.b64encode(picture).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": f"Request {number}: what is here?"},
        ]
        return self.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": 2,
                "ignore_eos": True,
            },
        )  # fmt: skip

    def metrics(self) -> str:
        """What Prometheus scrapes."""
        with urllib.request.urlopen(self.url("/metrics"), timeout=10) as response:
            return str(response.read().decode())

    def stop(self) -> int | None:
        """Exit code after SIGTERM; None where it has to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


@contextmanager
def serving(args: argparse.Namespace, graphs: bool) -> Iterator[Server]:
    """A server with seeded weights, killed if it is still there at the end."""
    server = Server(args, graphs)
    try:
        seconds = server.wait()
        print(f"# {server.folder.name}: serves after {seconds:.0f} s", flush=True)
        status, _ = server.post("/collective_rpc", {"method": "seeded_weights"})
        if status != 200:
            raise RuntimeError(f"the weights could not be filled: HTTP {status}")
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def as_row(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of an answer, and how far the two best of each were apart."""
    steps = answer["choices"][0]["logprobs"]["content"]
    gaps = []
    for step in steps:
        best = sorted((entry["logprob"] for entry in step["top_logprobs"]), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else None)
    return {"number": number, "tokens": [step["token"] for step in steps], "gaps": gaps}


def encoded(picture: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


class Served(NamedTuple):
    """Items by what `/metrics` says."""

    hits: int
    misses: int
    reasons: frozenset[str]

    @classmethod
    def by(cls, server: Server) -> "Served":
        """Of everything so far: a thread publishes every two seconds."""
        time.sleep(5)
        metrics = server.metrics()
        hits, misses = (
            re.findall(rf"^graphhal_encoder_{name}_total{{(.*)}} (\S+)$", metrics, re.MULTILINE)
            for name in ("hits", "misses")
        )
        counts = (sum(int(float(value)) for _, value in each) for each in (hits, misses))
        return cls(*counts, frozenset(REASON.findall("".join(labels for labels, _ in misses))))

    def __str__(self) -> str:
        return f"hits {self.hits}, misses {self.misses} ({', '.join(self.reasons) or 'none'})"


def told(log: Path) -> list[str]:
    """What graphhal said above DEBUG."""
    return [line for line in log.read_text().splitlines() if "graphhal: " in line]


class Table:
    """The lines that were printed, and whether one was wrong."""

    def __init__(self) -> None:
        self.failed = False
        print("| event | | found |\n|---|---|---|")

    def note(self, event: str, right: bool, found: str) -> None:
        self.failed |= not right
        print(f"| {event} | {'right' if right else 'WRONG'} | {found} |", flush=True)


def with_graphs(server: Server, table: Table, pictures: list[bytes]) -> list[dict[str, Any]]:
    """Everything a client and an operator see of a server with graphs; its answers."""
    from PIL import Image

    summary = [line for line in told(server.log) if " encoder graphs (" in line]
    shown = summary[0].split("graphhal: ")[1] if summary else "none"
    table.note("start-up line", len(summary) == 1 and " 0 dropped" in shown, shown)
    rows = []
    for number, picture in enumerate(pictures):
        status, answer = server.ask(picture, number)
        rows.append(as_row(number, answer) if status == 200 else {"tokens": [], "gaps": []})
    answered, wanted = sum(bool(row["tokens"]) for row in rows), len(pictures)
    table.note("one at a time", answered == wanted, f"{answered} of {wanted} answered")
    served = Served.by(server)
    table.note("`/metrics`", (served.hits, served.misses) == (wanted, 0), str(served))

    with ThreadPoolExecutor(8) as clients:
        shifted = [encoded(Image.open(io.BytesIO(p)).transpose(1)) for p in pictures]
        answered = sum(s == 200 for s, _ in clients.map(server.ask, shifted))
    table.note("eight at a time", answered == wanted, f"{answered} of {wanted} answered")
    before, served = served, Served.by(server)
    # Pictures of one step that are more than the largest graph together run eagerly.
    right = served.hits + served.misses == 2 * wanted and served.hits > before.hits
    table.note("`/metrics`", right and served.reasons <= {TOO_LARGE}, str(served))

    status, answer = server.ask(pictures[0][: len(pictures[0]) // 2])
    said = str(answer.get("error", answer))[:120].replace("\n", " ")
    table.note("half a picture", status == 400, f"HTTP {status}: {said}")
    large = Image.open(io.BytesIO(pictures[0])).resize((1600, 1600))
    status, _ = server.ask(encoded(large))
    before, served = served, Served.by(server)
    right = status == 200 and served.misses == before.misses + 1
    right &= served.reasons == {TOO_LARGE}
    table.note(f"a picture of more than {LARGEST} tokens", right, f"HTTP {status}, {served}")
    status, _ = server.ask(encoded(large.resize((300, 300))))
    table.note("the next one", status == 200, f"HTTP {status}")

    code = server.stop()
    last = [line.split("graphhal: ")[1] for line in told(server.log) if " hits, " in line]
    table.note("exit code after SIGTERM", code == 0, str(code))
    table.note("summary at shutdown", bool(last), last[-1] if last else "none")
    files = [json.loads(path.read_text()) for path in server.folder.glob("stats-*.json")]
    said = [(stats["graph_hits"], stats["graph_misses"]) for stats in files]
    right = said == [(served.hits + 1, served.misses)]
    table.note("JSON at shutdown", right, f"hits and misses {said}")
    return rows


def run(args: argparse.Namespace) -> int:
    Path(args.out).mkdir(parents=True, exist_ok=True)
    args.model = engine.model_folder(Path(args.out), "qwen3_vl")
    asked = argparse.Namespace(images=1, audios=0, requests=args.requests)
    pictures = [encoded(r["multi_modal_data"]["image"][0]) for r in engine.requests(asked)]
    table = Table()
    with serving(args, graphs=True) as server:
        ours = with_graphs(server, table, pictures)
    with serving(args, graphs=False) as server:
        found = [server.ask(picture, number) for number, picture in enumerate(pictures)]
        theirs = [as_row(number, answer) for number, (_, answer) in enumerate(found)]
        samples = [line for line in server.metrics().splitlines() if "graphhal" in line]
        code = server.stop()
        traces = len(told(server.log)) + len(samples)
    told_nothing = traces == 0 and code == 0
    table.note("without the flag", told_nothing, f"{traces} lines of log and metrics, exit {code}")
    equal, ties, unexplained = engine.differences(ours, theirs)
    counts = f"{equal} equal, {ties} near ties, {unexplained} unexplained"
    table.note("answers with and without graphs", unexplained == 0, counts)
    return int(table.failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    code = run(arguments())
    sys.stdout.flush()
    sys.exit(code)

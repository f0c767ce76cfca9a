"""Text from a run: python -m scripts.generate RUN --prompt "def " --max-new-tokens 100

RUN is a run folder, or one of its checkpoint folders.
"""
import argparse
import json
import sys
import time

import torch

from build import load_run
from config import ConfigError
from model.generate import generate
from runtime.failure import fail_cleanly


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", help="run folder or checkpoint folder")
    p.add_argument("--prompt", default="", help="text to go on from; empty: a new document")
    p.add_argument("--max-new-tokens", type=int, default=100)
    p.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    p.add_argument("--top-k", type=int, help="choose among the k likeliest")
    p.add_argument("--top-p", type=float, help="choose among the fewest tokens with this much probability")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--samples", type=int, default=1)
    p.add_argument("--json", action="store_true", help="one JSON object a sample")
    a = p.parse_args(argv)
    for name, ok in (("max-new-tokens", a.max_new_tokens > 0), ("temperature", a.temperature >= 0), ("samples", a.samples > 0),
                     ("top-k", a.top_k is None or a.top_k > 0), ("top-p", a.top_p is None or 0 < a.top_p <= 1)):
        if not ok:
            raise ConfigError(f"--{name}: out of range; see --help")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_run(a.run, device)
    m = loaded.cfg.model
    tok = loaded.tokenizer
    start = tok.encode(a.prompt) or [tok.eod]
    for i in range(a.samples):
        clock = time.perf_counter()
        ids = list(generate(loaded.logits, start, a.max_new_tokens, temperature=a.temperature, top_k=a.top_k, top_p=a.top_p,
                            eod=tok.eod, seed=a.seed + i, limit=m.context if m.positions == "learned" else None, device=device))
        seconds = time.perf_counter() - clock
        text = a.prompt + tok.decode(ids)
        if a.json:
            print(json.dumps({"text": text, "prompt_tokens": len(start), "new_tokens": len(ids), "tokens_per_s": len(ids) / seconds}))
        else:
            print(text if a.samples == 1 else f"--- sample {i}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))

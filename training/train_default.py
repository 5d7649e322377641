"""Train the embedded default model from scratch on one processor core.

The learning rate follows the clock: it warms up, then falls along a cosine that ends when the minutes
are used up, so a slow machine gets a worse model but always a finished one. Checkpoints hold model,
optimizer and position; they are safetensors plus JSON, never pickle.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

EXAMPLES = """\
examples:
  python training/train_default.py --minutes 80                 # the shipped model
  python training/train_default.py --minutes 2 --out build/try  # a quick trial
  python training/train_default.py --minutes 80 --install       # and put it into the package
Interrupt with Ctrl-C: a checkpoint is saved, and the same command goes on from there.
"""
WARM_UP_STEPS = 150
# Rows of several lengths, all of 2,048 tokens: short rows are quicker, long ones teach far positions.
SHAPES = ((16, 128), (8, 256), (16, 128), (4, 512))
BALANCE = 0.01


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=80.0, help="training time, over all resumed runs (80)")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (1)")
    parser.add_argument("--out", type=Path, default=Path("build/default-model"), help="folder for checkpoints")
    parser.add_argument("--data", type=Path, default=None, help="data folder (CLOISTER_DATA or ../shared/data)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the weights and of the data order (7)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate (0.003)")
    parser.add_argument("--save-minutes", type=float, default=4.0, help="time between checkpoints (4)")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="continue (default)")
    parser.add_argument("--install", action="store_true", help="put the finished model into the package")
    return parser.parse_args()


# Threads must be chosen before torch starts them, hence the import below the parser.
if __name__ == "__main__":
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoTokenizer, OlmoeForCausalLM  # noqa: E402

import corpus  # noqa: E402
import fastolmoe  # noqa: E402
import tokenizing  # noqa: E402
from exporting import PACKAGE_FOLDER, export  # noqa: E402
from packing import Batch, Cursor, Mixture  # noqa: E402


def batch_loss(model: OlmoeForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross entropy and balance loss of a batch."""
    ids, document = torch.from_numpy(batch.ids), torch.from_numpy(batch.document)
    weight = torch.from_numpy(batch.weight)[:, 1:].flatten()
    states, routing = fastolmoe.hidden_states(model, ids, fastolmoe.document_mask(document))
    wanted = weight.nonzero().squeeze(1)
    logits = F.linear(states[:, :-1].flatten(0, 1)[wanted], model.lm_head.weight)
    loss = F.cross_entropy(logits, ids[:, 1:].flatten()[wanted], reduction="none")
    loss = (loss * weight[wanted]).sum() / weight.sum()
    return loss, fastolmoe.balance_loss(routing, document.flatten() > 0)


class Run:
    """Model, optimizer and position of a training run, with saving and loading."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        root = corpus.data_root(options.data)
        self.tokenizer = self._tokenizer(root)
        torch.manual_seed(options.seed)
        self.model = OlmoeForCausalLM(fastolmoe.make_config())
        self.names = [name for name, _ in self.model.named_parameters()]
        matrices = [p for n, p in self.model.named_parameters() if p.ndim > 1 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim == 1 or "embed" in n]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)
        self.mixture = Mixture(self.tokenizer, root, options.seed)
        self.heldout = Mixture(self.tokenizer, root, options.seed, "heldout")
        self.step, self.seconds, self.tokens, self.cursor = 0, 0.0, 0, Cursor()
        if options.resume and (self.out / "checkpoint.json").exists():
            self.load()

    def _tokenizer(self, root: Path) -> tokenizing.PreTrainedTokenizerFast:
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            examples = (example for entry in corpus.SETS for example in entry.read(root, "train"))
            tokenizing.train(t for e in examples for t in (e.question or "", e.answer)).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)

    def save(self) -> None:
        """Write tensors under a new name, then rename the JSON that points at them: always consistent."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        file = self.out / f"checkpoint-{self.step}.safetensors"
        save_file(tensors, self.out / "writing.tmp")
        (self.out / "writing.tmp").replace(file)
        position = {
            "tensors": file.name,
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "seed": self.options.seed,
            "drawn": self.cursor.drawn,
        }
        (self.out / "writing.json").write_text(json.dumps(position, indent=1), encoding="utf-8")
        (self.out / "writing.json").replace(self.out / "checkpoint.json")
        for old in self.out.glob("checkpoint-*.safetensors"):
            if old != file:
                old.unlink()

    def load(self) -> None:
        position = json.loads((self.out / "checkpoint.json").read_text(encoding="utf-8"))
        if position["seed"] != self.options.seed:
            raise SystemExit(
                f"{self.out} holds a run with seed {position['seed']}: use it, --no-resume or another --out."
            )
        tensors = load_file(self.out / position["tensors"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
                self.optimizer.state[parameter] = {
                    key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.step, self.seconds, self.tokens = position["step"], position["seconds"], position["tokens"]
        self.cursor = Cursor(position["drawn"])
        print(f"resumed at step {self.step}, minute {self.seconds / 60:.1f}", file=sys.stderr)

    def log(self, **values: float) -> None:
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": self.step, "seconds": round(self.seconds, 1), **values}) + "\n")

    def heldout_loss(self) -> float:
        """Loss on the same few held-out batches every time; for the curve, not for any decision."""
        with torch.no_grad():
            cursor = Cursor()
            losses = [batch_loss(self.model, self.heldout.batch(i, 8, 256, cursor))[0].item() for i in range(6)]
        return sum(losses) / len(losses)

    def train_step(self) -> tuple[float, float]:
        """One update; the clock decides the learning rate."""
        done = min(1.0, self.seconds / (self.options.minutes * 60))
        factor = min(1.0, (self.step + 1) / WARM_UP_STEPS) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * factor
        rows, length = SHAPES[self.step % len(SHAPES)]
        batch = self.mixture.batch(self.step, rows, length, self.cursor)
        loss, balance = batch_loss(self.model, batch)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += int((batch.document > 0).sum())
        return loss.item(), balance.item()


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    run = Run(options)
    print(f"logits differ from transformers by {fastolmoe.check_equal(run.model):.1e}", file=sys.stderr)
    stop = False

    def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask_to_stop)
    recent: list[tuple[float, float]] = []
    saved = tested = run.seconds
    finished_before = run.seconds >= options.minutes * 60
    while run.seconds < options.minutes * 60 and not stop:
        start = time.monotonic()
        recent.append(run.train_step())
        if len(recent) == 25:
            loss, balance = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            run.log(loss=round(loss, 4), balance=round(balance, 4), tokens=run.tokens)
            speed = run.tokens / max(run.seconds, 1e-9)
            print(
                f"minute {run.seconds / 60:5.1f}/{options.minutes:g} step {run.step} loss {loss:.3f} "
                f"balance {balance:.3f} {speed:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
            recent.clear()
        # Saving and testing count as training time, so that --minutes is the wall clock.
        if run.seconds - tested > 180:
            tested = run.seconds
            run.log(heldout=round(run.heldout_loss(), 4))
        if run.seconds - saved > options.save_minutes * 60:
            saved = run.seconds
            run.save()
        run.seconds += time.monotonic() - start
    run.save()
    if stop:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return
    if not finished_before:
        run.log(heldout=round(run.heldout_loss(), 4))
    size = export(run.model, run.tokenizer, PACKAGE_FOLDER if options.install else run.out / "model")
    print(f"finished: {run.step} steps, {run.tokens:,} tokens, {size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(options)

"""Pictures of the default model's documentation: the loss curve and the load of the experts."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np


def loss_curve(log: Path, picture: Path) -> None:
    """Training and held-out loss over the tokens seen."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    train = [(row["tokens"] / 1e6, row["loss"]) for row in rows if "loss" in row]
    tokens_at = {row["step"]: row["tokens"] / 1e6 for row in rows if "tokens" in row}
    steps = np.array(sorted(tokens_at))
    values = np.array([tokens_at[step] for step in steps])
    heldout = [(float(np.interp(row["step"], steps, values)), row["heldout"]) for row in rows if "heldout" in row]
    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=120)
    axes.plot(*zip(*train, strict=True), linewidth=0.9, color="#7a9cc6", label="training (mean of 25 steps)")
    if heldout:
        axes.plot(*zip(*heldout, strict=True), "o-", markersize=3.5, color="#b3472f", label="held out")
    axes.set_xlabel("million tokens seen")
    axes.set_ylabel("weighted loss (nats per token)")
    axes.set_ylim(top=min(6.0, train[0][1]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def expert_load(load: np.ndarray, by_set: dict[str, np.ndarray], picture: Path) -> None:
    """Share of the routed tokens per layer and expert, and per data set in the first and last layer."""
    layers, experts = load.shape
    figure = plt.figure(figsize=(11.0, 6.6), dpi=120, layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 2.1))
    axes = upper.subplots()
    image = axes.imshow(load * 100, cmap="viridis", vmin=0, aspect="auto")
    for layer in range(layers):
        for expert in range(experts):
            value = load[layer, expert] * 100
            colour = "black" if value > image.get_clim()[1] * 0.6 else "white"
            axes.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_title(
        f"Load of the experts on held-out text, weighted as in training, per cent (even: {100 / experts:.2f})",
        fontsize=10,
    )
    axes.set_ylabel("layer")
    axes.set_yticks(range(layers))
    axes.set_xticks(range(experts))
    upper.colorbar(image, ax=axes)
    pair = lower.subplots(1, 2, sharey=True)
    names = list(by_set)
    for axes, layer in zip(pair, (0, layers - 1), strict=True):
        rows = np.array([by_set[name][layer] / by_set[name][layer].sum() * 100 for name in names])
        image = axes.imshow(rows, cmap="viridis", vmin=0, aspect="auto")
        axes.set_title(f"layer {layer}, by data set", fontsize=10)
        axes.set_xlabel("expert")
        axes.set_xticks(range(experts))
        axes.set_yticks(range(len(names)), names, fontsize=8)
        lower.colorbar(image, ax=axes)
    figure.savefig(picture)
    plt.close(figure)

"""Unification of image models: a small ViT as seed, and three owners of digits that look different.

    trial = Trial(Plan(), draw=0, cache=folder)
    trial.score("unified")      # {"white on black": 0.95, ...}

The owners hold handwritten digits: MNIST's as they are (white on black), other MNIST digits as ink on paper (black on
white), and scikit-learn's, which a tablet with 8x8 points recorded. Public are printed digits and capital letters in
many fonts, bent, turned, blurred, in both polarities; no handwriting. The seed is trained on them here, because no
small public ViT is at hand: so it knows digits a little before any owner trains, and the class vectors are the means of
its vectors of *printed* digits.

Everything else, the methods above all, is that of the text trials. Settings were chosen with
`Plan(development=True)`, which tests on other rows of the training data.
"""

from __future__ import annotations

import gzip
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cloister import storage
from cloister.bench.schema import Row
from cloister.bench.suites import Options, Workload
from cloister.bench.unify import far, text, text_rows
from cloister.bench.unify.rows import accuracies, gather
from cloister.bench.unify.text_data import Owner, PublicKind
from cloister.errors import NotAvailable
from cloister.progress import SILENT, Progress
from cloister.unify.examples import Examples, Pixels
from cloister.unify.experts import Settings
from cloister.unify.joint import JointSettings
from cloister.unify.seeds import Seed, pooled
from cloister.unify.tasks import SCALE, Images, prototypes
from cloister.unify.training import Descent, Loop, order, stamp

SIDE = 28
DIGITS = tuple(string.digits)
GLYPHS = "".join(c for c in string.digits + string.ascii_uppercase if c not in "IO")  # those look like 1 and 0
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10",
    "cmti10", "cmtt10",
)  # fmt: skip
WHITE, BLACK, TABLET = "white on black", "black on white", "tablet"
PAPER = "94.5 (CLIP ViT-B/32: Pets, Flowers, EuroSAT)"
HELD_OUT = 400  # of the tablet's digits, the last ones: for testing


@dataclass(frozen=True)
class Pretraining:
    """How the seed is made."""

    glyphs: int = 24_000
    epochs: int = 6
    batch: int = 64
    lr: float = 1.5e-3
    hidden: int = 96
    layers: int = 4
    patch: int = 7


@dataclass(frozen=True)
class Plan(text.Plan):
    """How large a trial is, and its settings."""

    private: Mapping[str, int] = field(default_factory=lambda: {"": 600})
    test: int = 400
    public: int = 12_000
    pool: int = 1500
    blend: float = 0.97  # looks are a matter of the whole image
    share: float = 0.0
    pretraining: Pretraining = field(default_factory=Pretraining)
    # Printed characters keep the vectors that the seed gives them, and much of that holds experts back.
    expert: Settings = field(
        default_factory=lambda: Settings(epochs=8, lr=2e-3, batch=16, proxy_batch=4, proxy_weight=0.02, keep_every=1e9)
    )
    joint: JointSettings = field(default_factory=lambda: JointSettings(public_weight=0.0, keep_every=1e9))
    routers: JointSettings = field(default_factory=lambda: JointSettings(keep_every=1e9))


QUICK = Plan(
    private={"": 60}, test=60, public=400, proxies=50, pool=200, pretraining=Pretraining(glyphs=2000, epochs=2),
    expert=Settings(epochs=2, lr=2e-3, batch=16, proxy_batch=8),
)  # fmt: skip


class Trial(far.Trial):
    """All methods on one draw of the data."""

    plan: Plan

    @cached_property
    def seed(self) -> Seed:
        """A ViT that has read print."""
        return seed(self.plan.pretraining, self.cache, self.progress)

    @cached_property
    def glyphs(self) -> Examples:
        """The public images, with what they show."""
        return printed(self.plan.public, draw=1)

    @cached_property
    def owners(self) -> list[Owner]:
        """The three organisations."""
        task = Images(DIGITS, prototypes(self.seed, printed(2000, draw=2), DIGITS))
        return [
            Owner(name, task, *self.part(number, name, whole, held_out))
            for number, (name, whole, held_out) in enumerate(handwritten(self.root))
        ]

    def public(self, kind: PublicKind) -> Examples:
        """Printed characters, whatever `kind` says: there is one public set."""
        return self.glyphs


# ---------------------------------------------------------------- handwriting


def handwritten(root: Path) -> list[tuple[str, Examples, Examples]]:
    """For each owner its name, all its training images and all its test images. No image has two owners."""
    (train, train_labels), (test, test_labels) = (_mnist(root / "mnist10k" / f"{p}.csv.gz") for p in ("train", "test"))
    own, labels = _tablet()
    cut = len(own) - HELD_OUT
    return [
        (WHITE, _images(train[::2], train_labels[::2]), _images(test[::2], test_labels[::2])),
        (BLACK, _images(255 - train[1::2], train_labels[1::2]), _images(255 - test[1::2], test_labels[1::2])),
        (TABLET, _images(own[:cut], labels[:cut]), _images(own[cut:], labels[cut:])),
    ]


@cache
def _mnist(path: Path) -> tuple[Pixels, NDArray[np.int64]]:
    if not path.is_file():
        raise NotAvailable(f"There is no {path}.", advice="Set CLOISTER_DATA to where the data sets lie.")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.uint8)
    return table[:, 1:].reshape(-1, 1, SIDE, SIDE), table[:, 0].astype(np.int64)


def _tablet() -> tuple[Pixels, NDArray[np.int64]]:
    """scikit-learn's 8x8 digits as images of our size; the file lies in the package, which is not imported."""
    from importlib.util import find_spec

    spec = find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise NotAvailable("scikit-learn's digits are not installed.", advice="Install them: pip install scikit-learn.")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    points = torch.from_numpy(table[:, :-1].reshape(-1, 1, 8, 8)) / 16
    large = functional.interpolate(points, size=(SIDE, SIDE), mode="bilinear")
    return (large * 255).to(torch.uint8).numpy(), table[:, -1].astype(np.int64)


def _images(pixels: Pixels, labels: Sequence[Any] | NDArray[Any]) -> Examples:
    names = tuple(str(i) for i in range(len(pixels)))
    return Examples("image", names, np.ascontiguousarray(pixels), tuple(str(label) for label in labels))


# ---------------------------------------------------------------- print


def printed(count: int, draw: int) -> Examples:
    """Digits and capital letters in the fonts that matplotlib brings: bent, turned, thickened, coarse, in both
    polarities. The same ones for the same `draw`."""
    random = np.random.default_rng([20261121, draw])
    shapes = _shapes()
    which, font = random.integers(0, len(GLYPHS), count), random.integers(0, len(FONTS), count)
    parts = [
        _looks(shapes[which[start : start + 2000], font[start : start + 2000]], random)
        for start in range(0, count, 2000)
    ]
    return _images(np.concatenate(parts), [GLYPHS[i] for i in which])


@cache
def _shapes() -> Tensor:
    """Every glyph in every font, centred: (glyphs, fonts, 2 SIDE, 2 SIDE)."""
    try:
        import matplotlib
        from matplotlib.ft2font import FT2Font
    except ImportError:
        raise NotAvailable("matplotlib's fonts are not here.", advice="pip install 'cloister[bench]'") from None
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    out = torch.zeros(len(GLYPHS), len(FONTS), 2 * SIDE, 2 * SIDE)
    for column, name in enumerate(FONTS):
        font = FT2Font(str(folder / f"{name}.ttf"))
        font.set_size(40, 72)
        for row, glyph in enumerate(GLYPHS):
            font.set_text(glyph, 0.0)
            font.draw_glyphs_to_bitmap(antialiased=True)
            bits = torch.from_numpy(np.array(font.get_image(), dtype=np.float32)) / 255
            scale = 1.36 * SIDE / max(bits.shape)
            size = [max(1, round(side * scale)) for side in bits.shape]
            bits = functional.interpolate(bits[None, None], size=size, mode="bilinear", antialias=True)[0, 0]
            top, left = ((2 * SIDE - side) // 2 for side in size)
            out[row, column, top : top + size[0], left : left + size[1]] = bits
    return out


def _looks(shapes: Tensor, random: np.random.Generator) -> Pixels:
    """How (n, side, side) shapes look after a life in the world."""
    count, images = len(shapes), shapes[:, None]

    def between(low: float, high: float, *size: int) -> Tensor:
        return torch.from_numpy(random.uniform(low, high, (count, *size)).astype(np.float32))

    def some(share: float) -> Tensor:
        return torch.from_numpy(random.random(count) < share)[:, None, None, None]

    images = torch.where(some(0.4), functional.max_pool2d(images, 3, 1, 1), images)
    images = torch.where(some(0.4), functional.max_pool2d(images, 3, 1, 1), images)
    turn, wide, high, lean = between(-0.25, 0.25), between(0.8, 1.2), between(0.8, 1.2), between(-0.35, 0.35)
    cos, sin = turn.cos(), turn.sin()
    moved = torch.stack(
        [
            torch.stack([cos * wide, (lean * cos - sin) * high, between(-0.12, 0.12)], 1),
            torch.stack([sin * wide, (lean * sin + cos) * high, between(-0.12, 0.12)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(moved, [count, 1, SIDE, SIDE], align_corners=False)
    waves = functional.interpolate(between(-0.1, 0.1, 2, 5, 5), size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    images = functional.grid_sample(images, grid + waves.permute(0, 2, 3, 1), align_corners=False)
    small = functional.interpolate(images, size=(9, 9), mode="bilinear", antialias=True)
    coarse = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    images = torch.where(some(0.3), coarse / coarse.amax((1, 2, 3), keepdim=True).clamp(min=0.2), images)
    images = (images * between(0.7, 1.0, 1, 1, 1)).clamp(0, 1)
    images = torch.where(some(0.5), 1 - images, images)
    return np.asarray((images * 255).to(torch.uint8).numpy())


# ---------------------------------------------------------------- the seed


def seed(settings: Pretraining, cache: Path | None = None, progress: Progress = SILENT) -> Seed:
    """A ViT trained to tell printed characters apart, from the cache if it was made before."""
    from transformers import ViTConfig, ViTModel

    name = stamp(settings=settings, glyphs=GLYPHS, fonts=FONTS)[:24]
    folder = cache and cache / "seeds" / name
    if folder and (folder / "config.json").is_file():
        return Seed.load(folder)
    config = ViTConfig(
        hidden_size=settings.hidden, num_hidden_layers=settings.layers, num_attention_heads=settings.hidden // 24,
        intermediate_size=4 * settings.hidden, image_size=SIDE, patch_size=settings.patch, num_channels=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTModel(config, add_pooling_layer=False)
        classes = torch.nn.Parameter(torch.randn(len(GLYPHS), settings.hidden))
    seen = printed(settings.glyphs, draw=0)
    numbers = torch.from_numpy((seen.pixels().astype(np.float32) / 255 - 0.5) / 0.5)
    right = torch.tensor([GLYPHS.index(str(target)) for target in seen.targets or ()])
    steps = settings.epochs * len(seen) // settings.batch
    rows = order(len(seen), settings.epochs, 0)

    def loss_at(step: int) -> Tensor:
        now = torch.from_numpy(rows[step * settings.batch : (step + 1) * settings.batch])
        vectors = pooled(model, {"pixel_values": numbers[now]}, "vision")
        return functional.cross_entropy(SCALE * vectors @ functional.normalize(classes, dim=-1).T, right[now])

    loop = Loop(
        {**dict(model.named_parameters()), "classes": classes}, steps=steps, settings=Descent(settings.lr),
        stamp=name, workdir=cache and cache / "seeds" / f"{name}.work",
    )  # fmt: skip
    loop.go(loss_at, progress=progress, what="Training the seed on print")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = ViTModel(config)  # with the pooler that Auto classes expect, and nobody uses
    whole.load_state_dict(model.state_dict(), strict=False)
    if folder:
        with storage.fresh_directory(folder) as partial:
            whole.save_pretrained(partial)
    return Seed.of(whole)


# ---------------------------------------------------------------- rows


def _methods(options: Options) -> list[Row]:
    plan = QUICK if options.quick else Plan()
    draws = gather(
        lambda draw, cache: Trial(plan, draw=draw, cache=cache, progress=options.progress), options, "Images"
    )
    return accuracies("vision", draws, behind=text_rows.BEHIND_POOLING, bars=not options.quick, paper=PAPER)


WORKLOADS = (
    Workload("vision", "3 owners of digits, a small ViT: accuracy beside every baseline", _methods, "points", 0.0),
)

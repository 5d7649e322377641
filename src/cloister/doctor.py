"""What this machine can do, and which modes fit a checkpoint: `cloister doctor`.

A checkpoint is judged from its configuration alone, so that the answer is there before anything large is downloaded.
Neither torch nor transformers is imported: the verdict on the machine must not depend on what it is a verdict about.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloister import __version__, families, modes
from cloister.crypto import native
from cloister.errors import BrokenCheckpoint
from cloister.families.layout import Heads, LatentHeads, Layout
from cloister.storage import gigabytes

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
ENVELOPE_BYTES = 700  # HTTP head and JSON around one message, as the ledger counts it for our own client
CHUNK_BYTES = 350  # one streamed token on its way back
CONFIG_LIMIT = 4_000_000
TEE_DEVICES = {
    "Intel TDX guest": ("/dev/tdx_guest",),
    "AMD SEV-SNP guest": ("/dev/sev-guest",),
    "Intel SGX": ("/dev/sgx_enclave", "/dev/sgx/enclave"),
}


# ---- this machine -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What `cloister doctor` found here."""

    system: str
    python: str
    cloister: str
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    torch: str | None
    transformers: str | None
    gpu: str | None
    rust_core: bool
    tee: list[str]
    works: dict[str, bool]
    slow: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        lines = [
            f"Cloister {self.cloister} on {self.system}, Python {self.python}",
            f"  cores        {self.cores}",
            f"  memory       {gigabytes(self.memory_bytes)}",
            f"  disk here    {gigabytes(self.disk_free_bytes)} free",
            f"  torch        {self.torch or 'not installed: pip install cloister[server]'}",
            f"  transformers {self.transformers or 'not installed: pip install cloister[server]'}",
            f"  GPU          {self.gpu or 'none seen'}",
            f"  Rust core    {'installed' if self.rust_core else 'not installed: install cargo, then `make install`'}",
            f"  TEE          {', '.join(self.tee) or 'no device: attestation is simulated here and protects nothing'}",
            "What works here:",
            *(f"  {'yes' if works else 'no ':<4} {what}" for what, works in self.works.items()),
        ]
        if self.slow:
            lines += ["What will be slow or will not fit:", *(f"  - {reason}" for reason in self.slow)]
        return "\n".join(lines)


def machine() -> Machine:
    """Look at this machine; takes well under a second."""
    torch, transformers = _version("torch"), _version("transformers")
    memory = _memory()
    heavy = torch is not None and transformers is not None
    gpu = "NVIDIA" if Path("/dev/nvidia0").exists() else "Apple (mps)" if platform.mac_ver()[0] and _arm() else None
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cloister=__version__,
        cores=_cores(),
        memory_bytes=memory,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        torch=torch,
        transformers=transformers,
        gpu=gpu,
        rust_core=native.available(),
        tee=[name for name, paths in TEE_DEVICES.items() if any(Path(path).exists() for path in paths)],
        works={
            "gateway, ask (the user's side)": True,
            "protect, serve (the developer's and the server's side)": heavy and os.name != "nt",
            "bench": heavy and all(find_spec(name) for name in ("matplotlib", "scipy")),
            "the two-party engine (the Rust core)": native.available(),
            "verify TDX quotes": find_spec("dcap_qvl") is not None,
        },
        slow=_slow(memory, gpu, heavy),
    )


def _slow(memory: int, gpu: str | None, heavy: bool) -> list[str]:
    reasons = []
    if not heavy:
        reasons.append("without torch and transformers this machine can only be a client")
    if gpu is None:
        reasons.append(
            f"serving without a GPU: expect seconds per token from about 3 billion active parameters on; "
            f"weights over {gigabytes(memory * 0.8)} do not fit in memory"
        )
    if _cores() < 4:
        reasons.append(
            f"{_cores()} cores: protecting is bound by them, not by the disk; `cloister bench` takes its time"
        )
    flags = _cpu_flags()
    if flags and not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        reasons.append("this processor has no bfloat16 arithmetic: serve with --dtype float32 if memory allows")
    if os.name == "nt":
        reasons.append("on Windows only the gateway and the client side are supported")
    return reasons


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _arm() -> bool:
    return platform.machine() in {"arm64", "aarch64"}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's if that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())


# ---- a checkpoint -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one generation loop costs. Bytes on the wire are estimates; the ledger counts the real ones."""

    loop: str
    server_disk_bytes: int  # OUT/server, one context
    client_disk_bytes: int  # OUT/client, one context
    serve_memory_bytes: int  # weights and one sequence of the longest length
    sent_bytes_per_prompt_token: int
    sent_bytes_per_answer_token: int
    received_bytes_per_answer_token: int
    messages: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """For people, one paragraph."""
        return (
            f"  loop {self.loop}: {self.messages}; OUT/server {gigabytes(self.server_disk_bytes)}, "
            f"OUT/client {gigabytes(self.client_disk_bytes)} per context; "
            f"about {gigabytes(self.serve_memory_bytes)} of memory to serve;\n"
            f"    a user's machine sends about {self.sent_bytes_per_prompt_token} B per prompt token and "
            f"{self.sent_bytes_per_answer_token} B per answer token, "
            f"and receives {self.received_bytes_per_answer_token} B per answer token"
        )


@dataclass(frozen=True)
class Checkup:
    """What `cloister doctor CHECKPOINT` found."""

    path: str
    family: str | None
    architecture: str
    task: str | None
    parameters: int
    dtype: str
    contexts: int
    modes: dict[str, list[str]]  # mode -> reasons against
    transforms: dict[str, list[str]]  # transform of mode permute -> reasons against
    notes: list[str]
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether some mode of this release takes this checkpoint."""
        return any(not reasons for reasons in self.modes.values())

    def against(self, transform: str) -> list[str]:
        """Every reason against protecting with `transform`."""
        return self.transforms.get(transform, [f"there is no transform {transform!r}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "fits": self.fits}

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.path}: {self.architecture or 'unknown architecture'}, family {self.family or 'none'}, "
            f"task {self.task or 'unknown'}"
        ]
        if self.parameters:
            lines.append(
                f"  {self.parameters / 1e6:,.1f} million parameters in {self.dtype}, the output head counted apart"
            )
        for mode, reasons in self.modes.items():
            lines.append(f"mode {mode}: {'fits' if not reasons else 'does not fit'}")
            lines += [f"  - {reason}" for reason in reasons]
        if self.family is not None and self.task is not None:
            for transform, reasons in self.transforms.items():
                lines.append(f"  transform {transform}: {'possible' if not reasons else 'not possible'}")
                lines += [f"    - {reason}" for reason in reasons]
        lines += [cost.sentence() for cost in self.costs.values()]
        if self.contexts > 1 and self.costs:
            total = self.contexts * max(cost.server_disk_bytes for cost in self.costs.values())
            lines.append(
                f"  {self.contexts} contexts: {gigabytes(total)} on the server; for operations, not for isolation"
            )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def checkpoint(path: Path | str, *, contexts: int = 1) -> Checkup:
    """Judge the checkpoint at `path` (a directory, or a config.json) from its configuration."""
    config = read_config(path)
    diagnosis = families.diagnose(config)
    layout = families.layout(config, ()) if diagnosis.supported else None
    blocked = _against_permute(diagnosis)
    return Checkup(
        path=str(path),
        family=diagnosis.family,
        architecture=diagnosis.architecture,
        task=diagnosis.task,
        parameters=parameters(layout) if layout else 0,
        dtype=_dtype(config),
        contexts=contexts,
        modes={
            "permute": blocked,
            **{name: [f"{what}: not part of this release"] for name, what in modes.announced().items()},
        },
        transforms=dict(diagnosis.transforms),
        notes=list(diagnosis.notes),
        costs=_costs(layout, config, _tokenizer_bytes(path)) if layout and not blocked else {},
    )


def _against_permute(diagnosis: families.Diagnosis) -> list[str]:
    if diagnosis.reasons or diagnosis.family is None:
        return list(diagnosis.reasons)
    if any(not reasons for reasons in diagnosis.transforms.values()):
        return []
    return [f"transform {name}: {reason}" for name, reasons in diagnosis.transforms.items() for reason in reasons]


def read_config(path: Path | str) -> dict[str, Any]:
    """The checkpoint's `config.json`."""
    file = Path(path) if Path(path).suffix == ".json" else Path(path) / "config.json"
    try:
        if file.stat().st_size > CONFIG_LIMIT:
            raise BrokenCheckpoint(
                f"{file} is larger than {gigabytes(CONFIG_LIMIT)}.", advice="Is this a model's configuration?"
            )
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise BrokenCheckpoint(
            f"{path} has no config.json.", advice="Point at a Hugging Face checkpoint; `hf download NAME` gets one."
        ) from None
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{file} cannot be read: {error}.", advice="Download the checkpoint again.") from None
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"{file} holds no JSON object.", advice="Download the checkpoint again.")
    return config


def parameters(layout: Layout) -> int:
    """How many numbers OUT/server holds. Experts are declared in two forms; the fused one is counted."""
    return sum(math.prod(spec.shape) for spec in layout.tensors.values() if spec.expert is None)


def _dtype(config: dict[str, Any]) -> str:
    name = (
        config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype") or "float32"
    )
    return str(name).removeprefix("torch.")


def _tokenizer_bytes(path: Path | str) -> int:
    """The tokenizer travels with the client; its size is known if it lies beside the configuration."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return sum(file.stat().st_size for file in folder.glob("tokenizer*.json"))


def _costs(layout: Layout, config: dict[str, Any], tokenizer: int) -> dict[str, Cost]:
    """Costs per loop. Only models that generate have two loops; the others send one message per question."""
    width = DTYPE_BYTES.get(_dtype(config), 4)
    table = math.prod(layout.tensors[layout.embedding].shape) * width if layout.embedding else 0
    vocabulary = layout.tensors[layout.embedding].shape[0] if layout.embedding else 0
    hidden = getattr(layout.spaces[layout.residual], "size", 0)
    weights = parameters(layout) * width
    cache = _cache_bytes_per_token(layout, width) * layout.max_positions
    row = math.ceil(hidden * width * 4 / 3)  # base64
    if layout.task != "generate":
        client = table + 4 * (vocabulary + hidden) + tokenizer
        return {
            "single": Cost("single", weights, client, weights, row, 0, 0, "one message per question"),
        }
    id_bytes = len(str(vocabulary)) + 2
    return {
        "server": Cost(
            "server",
            weights,
            4 * vocabulary + tokenizer,
            weights + cache,
            id_bytes,
            0,
            CHUNK_BYTES,
            "one message per answer",
        ),
        "token": Cost(
            "token",
            weights,
            table + 4 * vocabulary + tokenizer,
            weights + cache,
            row,
            row + ENVELOPE_BYTES,
            2 * CHUNK_BYTES,
            "one message per token",
        ),
    }


def _cache_bytes_per_token(layout: Layout, width: int) -> int:
    total = 0
    for space in layout.spaces.values():
        if isinstance(space, Heads):
            total += space.kv_heads * (space.qk_dim + space.v_dim)
        elif isinstance(space, LatentHeads):
            total += space.heads * (space.nope_dim + space.rope_dim + space.v_dim)
    return total * width

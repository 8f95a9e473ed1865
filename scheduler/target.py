"""Targets as data: what the compiler needs to know of a machine. Nothing else in WPK asks which machine it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from wpk.ir.errors import TargetError


class Target(BaseModel):
    """Rates are dense peaks of the datasheet (GPU) or of one current core times `blocks` (CPU)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["cpu", "cuda"]
    blocks: int  # blocks that run at once: SMs, or shares of a beat that CPU threads take in turn
    memory_bytes: int | None  # of the device; None: the host's
    bandwidth: float  # bytes/s
    flops: dict[str, float]  # FLOP/s by precision of the products
    barrier_s: float  # one grid barrier
    least_task_s: float  # shorter shares of a phase are not worth a block
    state_touch_s: float  # for a block to reach the state of one more session: they lie far apart, a TLB miss each
    cut: Literal["slots", "units"]  # whether a body gains from many sessions in one task, or any share will do
    devices: tuple[str, ...] = ()  # parts of the names by which a driver calls such a GPU


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="cpu", kind="cpu", blocks=8, memory_bytes=None, bandwidth=8 * 10e9,
            flops={"f32": 8 * 50e9, "tf32": 8 * 50e9, "bf16": 8 * 50e9}, barrier_s=2e-6, least_task_s=4e-6,
            state_touch_s=0.0, cut="slots",
        ),
        Target(
            name="h100-sxm", kind="cuda", blocks=132, memory_bytes=80 * 10**9, bandwidth=3.35e12,
            flops={"f32": 66.9e12, "tf32": 494.5e12, "bf16": 989e12}, barrier_s=0.9e-6, least_task_s=0.2e-6,
            state_touch_s=1.5e-6, cut="units",
            devices=("H100 80GB HBM3", "H100 SXM"),
        ),
        Target(
            name="h200", kind="cuda", blocks=132, memory_bytes=141 * 10**9, bandwidth=4.8e12,
            flops={"f32": 66.9e12, "tf32": 494.5e12, "bf16": 989e12}, barrier_s=0.9e-6, least_task_s=0.2e-6,
            state_touch_s=1.5e-6, cut="units",
            devices=("H200",),
        ),
    )
}  # fmt: skip


def find_target(name: str) -> Target:
    """The target of that name; `TargetError` lists the known ones."""
    if name not in TARGETS:
        raise TargetError(f"no target {name!r}", wanted=" | ".join(TARGETS), found=name)
    return TARGETS[name]


def target_of_device(name: str, multiprocessors: int) -> Target | None:
    """The target that describes a GPU of that name with so many multiprocessors; None where none does."""
    fitting = (t for t in TARGETS.values() if t.blocks == multiprocessors and any(d in name for d in t.devices))
    return next(fitting, None)

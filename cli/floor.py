"""`wpk floor`: the least time that physics allows a beat on a given machine."""

from __future__ import annotations

from typing import Annotated

import typer

from wpk.cli.output import Fields, JsonFlag, Output, QuietFlag, Table, size
from wpk.cli.profile import Cap, Context, Model


def floor(
    model: Model,
    cap: Cap,
    context: Context = None,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="A target: h200, h100-sxm or cpu.")] = "h200",
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """The physical floor of a beat: arithmetic, memory traffic and dependency path. No weights are needed."""
    from wpk.bench.floor import beat_floor, beat_shares

    found = beat_floor(model, capacity=cap, context=context, target=gpu)
    shares = beat_shares(model, capacity=cap, context=context, target=gpu)
    flops = {"bf16": found.flops["bf16"], "tf32": found.flops["tf32"], "fp32": found.flops["f32"]}
    Output(json, quiet).result(
        {"model": model, "capacity": cap, "gpu": gpu}
        | found.model_dump()
        | {"flops": flops}
        | {"operators": [share.model_dump() for share in shares]},
        names=[model],
        blocks=[
            Fields(
                {
                    "compute": f"{found.compute_ms:.4g} ms",
                    "bandwidth": f"{found.bandwidth_ms:.4g} ms",
                    "path": f"{found.path_ms:.4g} ms: chain {found.chain_ms:.4g}, barriers {found.barriers_ms:.4g}",
                    "floor": f"{found.floor_ms:.4g} ms",
                    "phase by phase": f"{found.per_operation_ms:.4g} ms",
                    "activations through memory": f"{found.unfused_ms:.4g} ms",
                    "traffic": ", ".join(f"{name} {size(count)}" for name, count in found.bytes.items()),
                    "FLOPs": ", ".join(f"{name} {count:,}" for name, count in flops.items()),
                },
                title=f"{model}, {cap} sessions on {gpu}",
            ),
            Table(
                ("operator", "phases", "ms", "weights", "state"),
                [
                    (s.operator, s.phases, f"{s.ms:.4g}", size(s.bytes["weights"]), size(s.bytes["state"]))
                    for s in shares
                    if s.ms >= found.floor_ms / 1000
                ],
                title="Phase by phase, by operator",
            ),
        ],
    )

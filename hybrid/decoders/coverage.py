"""The coverage report: what runs where, and why."""

from hybrid.decoders.containers import FusedContainer, NativeContainer
from hybrid.decoders.fused_model import FusedModel


def coverage_of(containers: list[NativeContainer], fused: FusedModel, copied: bool = True) -> list[dict[str, str]]:
    """What runs where: for each container its part's `module` name, its `kind`, the `container` that runs, and `why`.

    containers: as installed, one of them a FusedContainer.  copied: whether anything runs on the snapshot.
    """
    fallback_reason, last = fused.fallback_reason_now(), fused.reasons.last
    runs = "" if fallback_reason else fused.description + f"; the latest request ran natively: {last}" * bool(last)
    kind = NativeContainer.kind if fallback_reason else FusedContainer.kind
    rows = []
    for container in containers:
        part, why = container.part, f"{container.why}: {fallback_reason}" if fallback_reason else runs
        adapters = fused.snapshot.describe_adapters(part.module) if copied else ""
        why = f"{why}; {adapters}" if adapters else why
        rows.append({"module": part.name, "kind": part.kind, "container": kind, "why": why})
    return rows

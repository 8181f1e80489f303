"""The last observed step in words."""

from collections.abc import Mapping, Sequence

from steradian.watching._block import Alert, Block

__all__ = ["summary"]

_COLUMNS = (
    ("rate", "lr", "mean"),
    ("effective rate", "effective_lr", "median"),
    ("angle", "angle", "median"),
    ("in equilibrium", "equilibrium_angle", "median"),
    ("radius", "radius", "median"),
    ("in equilibrium", "equilibrium_radius", "median"),
    ("A⟨c,u⟩, largest", "radial", "max"),
    ("z, largest", "velocity", "max"),
    ("defect", "defect", "median"),
)


def summary(
    run: str, block: Block | None, order: Sequence[str], alerts: Sequence[Alert], missing: Mapping[str, str]
) -> str:
    """A table of the last step, one line per group in this order; medians over rows where nothing else is said."""
    if block is None or not len(block.steps):
        return f"{run}: nothing observed yet"
    last = block.at(-1)
    columns = [column for column in _COLUMNS if column[1] in block.quantities]
    lines = [["group", *(title for title, _, _ in columns)]]
    for group in (name for name in order if name in last):
        found = last[group]
        lines.append([group, *(f"{found[quantity][statistic]:.3g}" for _, quantity, statistic in columns)])
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    text = [f"{run}, step {int(block.steps[-1])}"]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells).rstrip())
    text += [f"alert: {alert}" for alert in alerts]
    by_reason: dict[str, list[str]] = {}
    for name, why in missing.items():
        by_reason.setdefault(why, []).append(name)
    text += [f"not recorded: {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return "\n".join(text)

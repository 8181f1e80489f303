"""What was found in a model, in words: the table of all rows and the story of one parameter."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from steradian.groups import Group, Groups

__all__ = ["explanation", "table"]


def table(groups: "Groups") -> str:
    """Rows, totals, and what is left to the rest."""
    lines = _columns([_row(group) for group in groups.groups])
    rows = sum(group.rows for group in groups.groups)
    inside = sum(groups.params[name].numel() for name in groups.layouts)
    total = sum(p.numel() for p in groups.params.values())
    share = 100 * inside / total if total else 0.0
    lines += ["", f"{rows} rows in {len(groups.layouts)} parameters: {inside} of {total} numbers ({share:.1f} %)"]
    plain = [name for name in groups.rest if name not in groups.no_effect and name not in groups.partial]
    for title, names in [("rest", plain), ("no effect", groups.no_effect), ("frozen", groups.frozen)]:
        if names:
            lines.append(f"{title}: {len(names)} parameters: {', '.join(names)}")
    lines += [f"partly invariant, left to the rest: {name}: {text}" for name, text in groups.partial.items()]
    lines += [f"tied: {name} = {' = '.join(others)}" for name, others in groups.aliases.items()]
    lines += [f"fact: {_set(fact)} ({fact.rows} × {fact.size}, {fact.reason})" for fact in groups.facts]
    small = [f"{group.small} of {' + '.join(group.names)}" for group in groups.groups if group.small]
    if small:
        lines.append(f"rows so small that ε dominates: {', '.join(small)}")
    return "\n".join([*lines, *(f"note: {note}" for note in groups.notes)])


def explanation(groups: "Groups", name: str) -> str:
    """One parameter: its layout, the reason, the defect, and what was measured."""
    lines = [f"{name}  {_shape(groups.params[name])}"]
    if name in groups.aliases:
        lines.append(f"  tied: also called {', '.join(groups.aliases[name])}")
    group = groups.group_of(name)
    lines += [f"  {line}" for line in (_verdict(groups, name) if group is None else _describe(group))]
    if name in groups.details:
        lines.append(f"  measured: {groups.details[name]}")
    lines += [f"  also a fact: {_set(fact)}, because of {fact.reason}" for fact in groups.facts if name in fact.names]
    return "\n".join(lines)


def _verdict(groups: "Groups", name: str) -> list[str]:
    if name in groups.frozen:
        return ["frozen: it does not require a gradient, so it was not tested"]
    if name in groups.no_effect:
        return ["no effect: no output depends on it"]
    if name in groups.partial:
        return [f"rest: {groups.partial[name]}"]
    if groups.params[name].is_complex():
        return ["rest: complex, and rows are real vectors"]
    return ["rest: not radially invariant"]


def _describe(group: "Group") -> list[str]:
    together = f", jointly with {', '.join(group.names)}" if len(group.names) > 1 else ""
    lines = [
        f"rows: {group.layout!r}, {group.rows} × {group.size}{together}",
        f"reason: {group.reason}",
        f"defect: {group.defect:.1e}, the largest |cos(x, ∇L)| over the rows at the model's own ε",
    ]
    if group.unseen:
        lines.append(f"{group.unseen} of {group.rows} rows were not reached by these inputs")
    if group.small:
        lines.append(f"{group.small} of {group.rows} rows are so small that ε dominates")
    return lines


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) if tensor.ndim else "scalar"


def _set(group: "Group") -> str:
    if len(group.names) == 1:
        return f"{group.names[0]} is invariant as {group.layout!r}"
    return f"{{{', '.join(group.names)}}} are jointly invariant as {group.layout!r}"


def _row(group: "Group") -> tuple[str, ...]:
    layout = group.layout if isinstance(group.layout, str) else repr(group.layout)
    return " + ".join(group.names), layout, f"{group.rows} × {group.size}", group.reason, f"{group.defect:.1e}"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["no radially invariant rows"]
    rows = [("parameter", "layout", "rows × d", "reason", "defect"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

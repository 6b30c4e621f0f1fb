"""The comparison table and the pictures: memory by role, memory over time, bars.

Pictures have no background and mid-grey text, so that they read on a light and on a dark page,
and are narrow enough for a phone.
"""

import html
import io
import itertools

from .measure import ROLES, GiB, Memory, MiB

COLOURS = dict(zip(ROLES, ("#4a7fb5", "#d9623b", "#b08a1e", "#8e6bbf", "#3f9a5f", "#909090")))
_TEXT = "#787878"


class Table:
    """Rows of cells by column name, shown as HTML, and as text elsewhere."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self.columns = list(rows[0])

    def _repr_html_(self) -> str:
        def line(cells, tag):
            style = "text-align:left;white-space:normal;padding:3px"
            cells = "".join(f'<{tag} style="{style}">{html.escape(str(c))}</{tag}>' for c in cells)
            return f"<tr>{cells}</tr>"

        body = "".join(line(row.values(), "td") for row in self.rows)
        return f"<table><thead>{line(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"

    def __str__(self) -> str:
        lines = [self.columns, *([str(cell) for cell in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

    __repr__ = __str__


def size(count: float) -> str:
    """Bytes as MiB, or as GiB from one GiB on."""
    return f"{count / GiB:.2f} GiB" if abs(count) >= GiB else f"{count / MiB:.1f} MiB"


def memory_table(reports: dict[str, Memory]) -> Table:
    """A row for each role and the peak, a column for each report."""
    rows = [
        {"at the peak": role, **{name: size(report.parts[role]) for name, report in reports.items()}} for role in ROLES
    ]
    rows.append({"at the peak": "peak", **{name: size(r.peak) for name, r in reports.items()}})
    for name, note in (("allocated", "allocated (CUDA)"), ("reserved", "reserved (CUDA)")):
        values = {title: getattr(report, name) for title, report in reports.items()}
        if all(value is not None for value in values.values()):
            rows.append({"at the peak": note, **{title: size(value) for title, value in values.items()}})
    return Table(rows)


def memory_bars(reports: dict[str, Memory], card: int | None = None, card_name: str = "card"):
    """A bar for each report, by role, and a line where a card ends."""
    axes = _axes(0.9 + 0.45 * len(reports))
    if axes is None:
        return
    scale, unit = _scale(max(r.peak for r in reports.values()))
    names = list(reports)
    left = [0.0] * len(names)
    for role in ROLES:
        widths = [reports[name].parts[role] / scale for name in names]
        if max(widths) > 0.002 * max(r.peak for r in reports.values()) / scale:
            axes.barh(names, widths, left=left, color=COLOURS[role], label=role, height=0.65)
        left = [start + width for start, width in zip(left, widths)]
    for position, total in enumerate(left):
        axes.annotate(f"{total:.3g}", (total, position), (3, 0), textcoords="offset points", va="center", color=_TEXT)
    axes.margins(x=0.12)
    if card is not None:
        axes.axvline(card / scale, color=_TEXT, linestyle="--")
        axes.annotate(
            card_name,
            (card / scale, 1.0),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=_TEXT,
        )
    axes.invert_yaxis()
    axes.set_xlabel(f"tensor memory at the peak, {unit}")
    _legend(axes)
    _show(axes)


def timeline(report: Memory):
    """Memory by role after each operation of the step, with the phase it belongs to."""
    axes = _axes(3.0)
    if axes is None:
        return
    scale, unit = _scale(report.peak)
    # The highest moment of each of 200 stretches, so that no short peak is lost between pixels.
    stride = -(-len(report.timeline) // 200)
    moments = [
        max(range(start, min(start + stride, len(report.timeline))), key=lambda i: sum(report.timeline[i]))
        for start in range(0, len(report.timeline), stride)
    ]
    columns = list(zip(*(report.timeline[i] for i in moments)))
    shown = [(role, column) for role, column in zip(ROLES, columns) if max(column) > 0.002 * report.peak]
    axes.stackplot(
        moments,
        *([value / scale for value in column] for _, column in shown),
        colors=[COLOURS[role] for role, _ in shown],
        labels=[role for role, _ in shown],
        linewidth=0,
        step="mid",
    )
    for phase, run in itertools.groupby(range(1, len(report.phases)), key=report.phases.__getitem__):
        places = list(run)
        start, end = places[0], places[-1]
        if len(places) > 0.15 * len(report.phases):  # room for its name
            axes.axvline(end, color=_TEXT, linestyle=":", linewidth=1)
            axes.annotate(
                phase,
                ((start + end) / 2, 1.0),
                (0, 3),
                ha="center",
                va="bottom",
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=_TEXT,
            )
    axes.set_xlim(0, len(report.timeline) - 1)
    axes.set_xlabel("operations of one training step")
    axes.set_ylabel(f"tensor memory, {unit}")
    _legend(axes)
    _show(axes)


def bars(values: dict[str, float], unit: str):
    """One horizontal bar for each name, with its value."""
    axes = _axes(0.7 + 0.3 * len(values))
    if axes is None:
        return
    drawn = axes.barh(list(values), list(values.values()), color=COLOURS["weights"], height=0.65)
    axes.bar_label(drawn, [f"{value:.3g}" for value in values.values()], padding=3, color=_TEXT)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _show(axes)


def lines(series: dict[str, dict[float, float]], x: str, y: str, logarithmic: bool = False):
    """A line for each name through its points {x: y}; x and y name the axes, with their units."""
    axes = _axes(3.0)
    if axes is None:
        return
    for (name, points), colour, marker in zip(series.items(), COLOURS.values(), "osv^DX"):
        axes.plot(list(points), list(points.values()), color=colour, marker=marker, markersize=4, label=name)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for points in series.values() for place in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if len(series) > 1:
        _legend(axes)
    _show(axes)


def _scale(peak: int) -> tuple[int, str]:
    return (GiB, "GiB") if peak >= GiB else (MiB, "MiB")


def _axes(height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no picture")
        return None
    axes = Figure(figsize=(5, height), layout="constrained").subplots()
    axes.patch.set_alpha(0)
    for spine in axes.spines.values():
        spine.set_color(_TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_TEXT)
    axes.xaxis.label.set_color(_TEXT)
    axes.yaxis.label.set_color(_TEXT)
    return axes


def _legend(axes):
    axes.figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=_TEXT)


def _show(axes):
    try:
        from IPython.display import Image, display
    except ImportError:
        return
    png = io.BytesIO()
    axes.figure.savefig(png, format="png", dpi=192, transparent=True)
    display(Image(png.getvalue(), width=480))

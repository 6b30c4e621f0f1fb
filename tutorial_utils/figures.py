"""The comparison table and the pictures: memory by role, memory over time, bars.

Pictures have no background and mid-grey text, so that they read on a light and on a dark page,
and are narrow enough for a phone.
"""

import difflib
import html
import inspect
import io
import itertools
import math
import numbers
import textwrap

from .check import accept
from .measure import ROLES, GiB, Memory, MiB
from .times import Timing

COLOURS = dict(zip(ROLES, ("#4a7fb5", "#d9623b", "#b08a1e", "#8e6bbf", "#3f9a5f", "#909090")))
_TEXT, _OUTSIDE = "#787878", "outside tensors"


class Table:
    """Rows of cells by column name, shown as HTML, and as text elsewhere."""

    def __init__(self, rows: list[dict]):
        accept(isinstance(rows, list) and all(isinstance(row, dict) for row in rows), "rows", rows, "a list of dicts")
        self.columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        self.rows = [{name: row.get(name, "") for name in self.columns} for row in rows]

    def _repr_html_(self) -> str:
        def line(cells, tag):
            style = "text-align:left;white-space:normal;padding:3px"
            cells = "".join(f'<{tag} style="{style}">{html.escape(str(c))}</{tag}>' for c in cells)
            return f"<tr>{cells}</tr>"

        body = "".join(line(row.values(), "td") for row in self.rows)
        return f"<table><thead>{line(self.columns, 'th')}</thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        lines = [self.columns, *([str(cell) for cell in row.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def size(count: float) -> str:
    """Bytes as MiB, or as GiB from one GiB on."""
    right = isinstance(count, numbers.Real) and not (isinstance(count, int) and abs(count) > 2**1000)
    accept(right, "count", count, "a number of bytes")
    return f"{count / GiB:.2f} GiB" if abs(count) >= GiB else f"{count / MiB:.1f} MiB"


def memory_table(reports: dict[str, Memory]) -> Table:
    """A row for each role and the peak, a column for each report."""
    _some("reports", reports, Memory)
    rows = {role: [report.parts[role] for report in reports.values()] for role in ROLES}
    rows["peak"] = [report.peak for report in reports.values()]
    for name in ("allocated", "reserved"):
        rows[f"{name} (CUDA)"] = [getattr(report, name) for report in reports.values()]
    sizes = {name: map(size, values) for name, values in rows.items() if None not in values}
    return Table([{"at the peak": name, **dict(zip(reports, row))} for name, row in sizes.items()])


def memory_bars(reports: dict[str, Memory], card: int | None = None, card_name="card", outside=False, show=None):
    """A bar for each report, by role, and a line at what a card gives a process, in bytes.

    outside: also what a prediction's card holds besides tensors. show: what takes the picture, in place of display.
    """
    _some("reports", reports, Memory)
    accept(card is None or isinstance(card, numbers.Real), "card", card, 'bytes, such as machine.gpu("T4").usable')
    predicted = not outside or all(getattr(report, "card_bytes", None) for report in reports.values())
    accept(predicted, "outside", outside, "False, or True for predictions, which know it")
    if (axes := _axes(max(1.8, 0.9 + 0.45 * len(reports)))) is None:
        return
    peak = max(report.peak for report in reports.values())
    scale, unit = _scale(max(peak, card or 0))
    ends = [0.0] * len(reports)
    held = [one.parts | ({_OUTSIDE: one.card_bytes - one.peak} if outside else {}) for one in reports.values()]
    for part in held[0]:
        widths = [of[part] / scale for of in held]
        if max(widths) > 0.002 * peak / scale:
            axes.barh(list(reports), widths, left=ends, color=COLOURS.get(part, "#bcbcbc"), label=part, height=0.65)
        ends = [end + width for end, width in zip(ends, widths)]
    line = (card or 0) / scale
    for position, end in enumerate(ends):  # a number that the line would strike stands behind it
        place = line if 0 <= line - end < 0.13 * max(line, *ends) else end
        axes.annotate(f"{end:.3g}", (place, position), (3, 0), textcoords="offset points", va="center", color=_TEXT)
    axes.margins(x=0.12)
    if card is not None:
        axes.axvline(line, color=_TEXT, linestyle="--")
        _name_above(axes, line, card_name)
    axes.invert_yaxis()
    axes.set_xlabel(f"{'memory of the card' if outside else 'tensor memory'} at the peak, {unit}")
    _show(axes, show=show)


def timeline(reports: Memory | dict[str, Memory], show=None):
    """Memory by role after each operation of the step, with the phase it belongs to; of several, one below another.

    show: what takes the picture, in place of display.
    """
    reports = reports if isinstance(reports, dict) else {"": reports}
    _some("reports", reports, Memory)
    if (panels := _axes(0.8 + 2.2 * len(reports), len(reports))) is None:
        return
    scale, unit = _scale(max(report.peak for report in reports.values()))
    for axes, (name, report) in zip(panels, reports.items()):
        _over_time(axes, report, scale)
        axes.set(ylabel=f"{name}, {unit}" if name else f"tensor memory, {unit}")
        axes.set(ylim=(0, 1.05 * max(report.peak for report in reports.values()) / scale))
    axes.set_xlabel("operations of one training step")
    _show(axes, show=show)


def _over_time(axes, report: Memory, scale: int):
    # The highest moment of each of 200 stretches, so that no short peak is lost between pixels.
    count = len(report.timeline)
    stride = math.ceil(count / 200)
    stretches = [range(count)[start : start + stride] for start in range(0, count, stride)]
    moments = [max(stretch, key=lambda i: sum(report.timeline[i])) for stretch in stretches]
    columns = {role: [report.timeline[i][n] / scale for i in moments] for n, role in enumerate(ROLES)}
    shown = {role: column for role, column in columns.items() if max(column) > 0.002 * report.peak / scale}
    colours = [COLOURS[role] for role in shown]
    axes.stackplot(moments, *shown.values(), colors=colours, labels=shown, linewidth=0, step="mid")
    for phase, run in itertools.groupby(range(1, len(report.phases)), key=report.phases.__getitem__):
        places = list(run)
        if len(places) > 0.12 * len(report.phases):  # room for its name
            axes.axvline(places[-1], color=_TEXT, linestyle=":", linewidth=1)
            _name_above(axes, (places[0] + places[-1]) / 2, phase)
    axes.set(xlim=(0, count - 1))


def bars(values: dict[str, float], unit: str):
    """One horizontal bar for each name, with its value."""
    _some("values", values, numbers.Real)
    if (axes := _axes(0.7 + 0.3 * len(values))) is None:
        return
    drawn = axes.barh(list(values), list(map(float, values.values())), color=COLOURS["weights"], height=0.65)
    axes.bar_label(drawn, [f"{value:.3g}" for value in values.values()], padding=3, color=_TEXT)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    _show(axes, legend=False)


def strips(rows: dict[str, list[tuple]], x: str = ""):
    """A row of coloured pieces for each name: [(width, kind, text written inside), …]; kind "" leaves a gap.

    What a batch looks like, what is kept and until when, what has which type, who holds which part. Roles of memory
    have their colours, and "padding" and "frozen" are grey; x names the axis, which is not drawn without it.
    """
    _some("rows", rows, list)
    for piece in itertools.chain.from_iterable(rows.values()):
        right = isinstance(piece, tuple) and len(piece) in (2, 3) and isinstance(piece[0], numbers.Real)
        accept(right and all(isinstance(text, str) for text in piece[1:]), "piece", piece, "(width, kind, text)")
    if (axes := _axes(0.8 + 0.42 * len(rows))) is None:
        return
    kinds = list(dict.fromkeys(kind for pieces in rows.values() for _, kind, *_ in pieces if kind))
    known = COLOURS | dict.fromkeys(("padding", "frozen"), COLOURS["temporary"])
    others = itertools.cycle(colour for role, colour in list(COLOURS.items())[:-1] if role not in kinds)
    colours = {kind: known.get(kind) or next(others) for kind in kinds}
    for place, pieces in enumerate(rows.values()):
        start = 0.0
        for width, kind, *text in pieces:
            if kind and width:
                axes.barh(place, width, left=start, color=colours[kind], height=0.7, edgecolor="white", linewidth=0.6)
                axes.text(start + width / 2, place, *text or [""], ha="center", va="center", color="white", size=9)
            start += width
    for kind, colour in colours.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlabel(x)
    if not x:
        axes.set_xticks([])
    _show(axes)


def lines(series: dict[str, dict[float, float]], x: str, y: str, logarithmic: bool = False):
    """A line for each name through its points {x: y}; x and y name the axes, with their units."""
    _some("series", series, dict)
    if (axes := _axes(3.0)) is None:
        return
    for (name, points), (colour, marker) in zip(series.items(), itertools.cycle(zip(COLOURS.values(), "osv^DX"))):
        axes.plot(list(points), list(points.values()), color=colour, marker=marker, markersize=4, label=name)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for points in series.values() for place in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    elif all(isinstance(place, int) for points in series.values() for place in points):
        axes.xaxis.get_major_locator().set_params(integer=True)  # no half workers
    axes.set(ylim=(0, None), xlabel=x, ylabel=y)
    _show(axes, legend=len(series) > 1)


def _some(name: str, given, kind: type):
    """ValueError where there is nothing to show, or something else than what is shown."""
    what = {numbers.Real: "numbers", Memory: "measure.Memory", dict: "points {x: y}", list: "pieces"}[kind]
    right = isinstance(given, dict) and given and all(isinstance(value, kind) for value in given.values())
    accept(right, name, given, f"{what} by name, one or more")


def _scale(peak: int) -> tuple[int, str]:
    return (GiB, "GiB") if peak >= GiB else (MiB, "MiB")


class difference:
    """Two functions line by line: what the second has more, and what it has no longer. Indentation does not count."""

    def __init__(self, before, after):
        old, new = (textwrap.dedent(inspect.getsource(function)).splitlines() for function in (before, after))
        bare = [[line.strip() for line in lines] for lines in (old, new)]
        self.lines = []
        for kind, i, j, k, m in difflib.SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
            if kind != "equal":
                self.lines += [("-", line) for line in old[i:j]]
            self.lines += [(" " if kind == "equal" else "+", line) for line in new[k:m]]

    def _repr_html_(self) -> str:
        colours = {"-": "rgba(217,98,59,.25)", "+": "rgba(63,154,95,.3)", " ": "transparent"}
        lines = (
            f'<span style="background:{colours[mark]}">{mark} {html.escape(line)}</span>' for mark, line in self.lines
        )
        return f'<pre style="white-space:pre-wrap;font-family:monospace;line-height:1.4">{chr(10).join(lines)}</pre>'

    def __repr__(self) -> str:
        return "\n".join(f"{mark} {line}".rstrip() for mark, line in self.lines)


def time_table(timing: Timing, texts: int, to: str | None = None) -> Table:
    """A row for each step of a timing: median, spread, texts a second, the median of its ratios to the step `to`."""
    rows = []
    for name in timing.rounds:
        middle, spread = timing.median(name), (f"{1000 * seconds:.0f}" for seconds in timing.spread(name))
        row = {"": name, "median ms": f"{1000 * middle:.0f}", "fastest to slowest": " to ".join(spread)}
        ratio = {"× (median)": f"{timing.ratio(name, to):.2f}"} if to else {}
        rows.append(row | {"texts/s": f"{texts / middle:.0f}"} | ratio)
    return Table(rows)


def _axes(height: float, panels: int | None = None):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no picture")
        return None
    every = Figure(figsize=(5, height), layout="constrained").subplots(panels or 1, squeeze=False)[:, 0]
    for axes in every:
        axes.spines[:].set_color(_TEXT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_TEXT)
        axes.xaxis.label.set_color(_TEXT)
        axes.yaxis.label.set_color(_TEXT)
    return every if panels else every[0]


def _name_above(axes, place: float, name: str):
    axes.annotate(
        name, (place, 1.0), (0, 3), ("data", "axes fraction"), "offset points", ha="center", va="bottom", color=_TEXT
    )


def _show(axes, legend: bool = True, show=None):
    if legend:
        drawn = {}  # once each, whatever the panels
        for panel in axes.figure.axes:
            drawn |= dict(zip(*reversed(panel.get_legend_handles_labels())))
        longest = max(map(len, drawn), default=0)
        columns = max(1, min(3, 62 // (longest + 5)))  # what 480 pixels hold: a wider legend is cut off
        place = dict(loc="outside lower center", ncols=columns, frameon=False)
        axes.figure.legend(drawn.values(), drawn, labelcolor=_TEXT, **place)
    picture(axes.figure, show=show)


def picture(figure, width: int = 480, show=None):
    """A figure of matplotlib, `width` pixels wide and without a background; nothing where there is no notebook."""
    try:
        from IPython.display import Image, display
    except ImportError:
        return
    figure.savefig(png := io.BytesIO(), format="png", dpi=192, transparent=True)
    (show or display)(Image(png.getvalue(), width=width))

"""The panel: choose a model, a card, a batch and techniques; see what fits. `panel()`"""

import html

from . import figures, machine, models, predict
from .check import accept

LENGTHS, BATCHES, CHECKPOINTS = (32, 64, 128, 256, 512), (1, 2, 4, 8, 16, 32, 64), {"none": 0, "every layer": 1}


def panel(model: str = "bert-large-uncased", card: str = "Tesla T4", batch: int = 32, length: int = 128):
    """Show the prediction for these and, where widgets work, controls that change it.

    The picture and the verdict are plain outputs, which the controls replace: a page without widgets keeps them.
    card: a GPU of facts/gpus.toml or a size such as "6 GiB". ValueError for what the controls do not offer.
    """
    gpu = machine.gpu(card)
    offered = {"model": (model, models.names()), "batch": (batch, BATCHES), "length": (length, LENGTHS)}
    for name, (given, accepted) in offered.items():
        accept(type(given) is type(accepted[0]) and given in accepted, name, given, ", ".join(map(str, accepted)))
    if lacks := no_controls():
        print(f"{_sentence(predict.step_memory(model, batch, length, card=card), gpu)}\n{lacks}: no panel")
        return
    import ipywidgets

    controls = {
        "model": ipywidgets.Dropdown(options=models.names(), value=model),
        "card": ipywidgets.Dropdown(options=list(dict.fromkeys([gpu.name, *machine.gpus()])), value=gpu.name),
        "batch": ipywidgets.SelectionSlider(options=BATCHES, value=batch, continuous_update=False),
        "length": ipywidgets.SelectionSlider(options=LENGTHS, value=length, continuous_update=False),
        "optimizer": ipywidgets.Dropdown(options=predict.OPTIMIZERS),
        "precision": ipywidgets.Dropdown(options=list(predict.PRECISIONS)),
        "checkpointing": ipywidgets.Dropdown(options=CHECKPOINTS),
        "freeze_layers": ipywidgets.BoundedIntText(min=0, max=48),
        "lora": ipywidgets.Dropdown(options={"none": 0, "rank 8": 8}),
        "padded": ipywidgets.Checkbox(value=True, indent=False),
    }
    say, picture = show_controls(controls)

    def show(_=None):
        choices = {name: control.value for name, control in controls.items()}
        try:
            report = predict.step_memory(**choices)
        except (ValueError, ImportError) as error:
            return say(f"No prediction: {error}")
        gpu = machine.gpu(choices["card"])
        say(_sentence(report, gpu))
        shown = {f"{choices['model']}\n{choices['batch']} × {choices['length']}": report}
        figures.memory_bars(shown, gpu.usable, gpu.name, outside=True, show=picture.update)

    for control in controls.values():
        control.observe(show, "value")
    show()


def no_controls() -> str | None:
    """Why there can be none here."""
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError as error:
        return f"{error.name} is not installed"
    return None if get_ipython() else "this is no notebook"


def show_controls(controls: dict, *more):
    """Under each other, by their names; on a page without widgets, a sentence in their place.

    Returns what says a sentence below them, and the display below that.
    """
    import ipywidgets
    from IPython.display import HTML, display

    for name, control in controls.items():
        control.description = name.replace("_", " ")
    box = ipywidgets.VBox([*controls.values(), *more])
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    static = "<p>Run this cell in Jupyter, Kaggle or Colab to have the controls.</p>"
    display({"application/vnd.jupyter.widget-view+json": view, "text/html": static, "text/plain": ""}, raw=True)
    verdict, below = display(HTML(), display_id=True), display(HTML(), display_id=True)

    def say(text):
        verdict.update({"text/html": f"<p>{html.escape(text)}</p>", "text/plain": text}, raw=True)

    return say, below


def _sentence(report: predict.Prediction, gpu: machine.Gpu) -> str:
    parts = ", ".join(f"{name} {figures.size(size)}" for name, size in report.card_parts.items())
    return (
        f"{'Fits' if report.fits else 'Does not fit'}: at most {figures.size(report.card_bytes)} on the card "
        f"({parts}), of {figures.size(gpu.usable)} that a {gpu.name} gives a process."
    )

"""The planner with controls. `panel()`"""

from .. import explorer, machine, models
from .search import instead, plan, smallest, table


def panel(model: str = "bert-large-uncased", card: str = "Tesla T4", length: int = 128, effective_batch: int = 32):
    """Show controls, beginning with these, and a button that plans: the arguments of `plan`.

    Nothing is planned before the button is pressed: it takes some seconds. Where widgets do not work, it says so.
    """
    if lacks := explorer.no_controls():
        print(f"{lacks}: no panel. planner.table(planner.plan({model!r}, {card!r}, {length}, {effective_batch}))")
        return
    import ipywidgets

    cards = list(dict.fromkeys([machine.gpu(card).name, *machine.gpus()]))
    controls = {
        "model": ipywidgets.Dropdown(options=models.names(), value=model),
        "card": ipywidgets.Dropdown(options=cards, value=cards[0]),
        "length": ipywidgets.BoundedIntText(min=1, max=1_000_000, value=length),
        "effective_batch": ipywidgets.BoundedIntText(min=1, max=4096, value=effective_batch),
        "whole": ipywidgets.Checkbox(indent=False),
        "exact": ipywidgets.Checkbox(indent=False),
        "no_new_dependency": ipywidgets.Checkbox(indent=False),
    }
    button = ipywidgets.Button(description="plan")
    say, found = explorer.show_controls(controls, button)
    controls["whole"].description, controls["exact"].description = "all parameters are trained", "exact gradients"

    def with_progress(function, groups):
        for number, group in enumerate(groups):
            say(f"{number} of {len(groups)} groups of recipes predicted")
            yield function(group)

    def show(_):
        asked = {name: control.value for name, control in controls.items()}
        button.disabled = True
        try:
            options = plan(**asked, each=with_progress)
            fitting = [option for option in options if not option.why]
            best = fitting and f"The least work: {fitting[0].recipe.name}, {fitting[0].micro_batch} texts at a time."
            say(best or instead(options, smallest(options, **asked)))
            found.update(table(options))
        except (ValueError, ImportError) as error:
            say(f"No plan: {error}")
        finally:
            button.disabled = False

    say("Choose, and press plan.")
    found.update({"text/html": "", "text/plain": ""}, raw=True)
    button.on_click(show)

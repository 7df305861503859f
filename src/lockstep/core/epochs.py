"""Formats numbers of epochs as text."""


def format_epochs(epochs: float) -> str:
    """Return the number of epochs as text, such as `1 epoch`, `25 epochs`, `2.5 epochs` or `22 % of an epoch`."""
    if epochs < 1:
        return f"{100 * epochs:.2g} % of an epoch"
    if epochs == 1:
        return "1 epoch"
    return f"{int(epochs):,} epochs" if epochs == int(epochs) else f"{epochs:,.3g} epochs"

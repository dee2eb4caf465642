"""What a weight stores and sends."""

from ._lowp import Recipe
from . import _lowp


class Plan(dict):
    """The plan of one weight: ``stored`` and ``sent`` bytes of all ranks together, ``fsdp2``, the bytes that every rank sends in each
    phase where FSDP2 cuts the rows (or why it cannot), and ``text``, the tables, which it prints."""

    def __str__(self):
        return self["text"]


def plan(recipe, rows, cols, world_size, *, reshard_after_forward=True, recompute=False, **options):
    """Returns what ``lowp plan`` reports: the bytes that a ``rows`` x ``cols`` weight over ``world_size`` ranks stores, and sends in a step. With
    ``recompute`` the weight is in a block under activation checkpointing, whose backward gathers what both directions need: from the second step on, as in the first one
    nobody knows of it."""
    recipe = as_recipe(recipe, options)
    for name, number in (("rows", rows), ("cols", cols), ("world_size", world_size)):
        if not isinstance(number, int) or number < 0:
            raise _lowp.LowpError(f"{name}={number!r}; give a number that is not negative")
    return Plan(_lowp.plan(recipe, rows, cols, world_size, reshard_after_forward, recompute))


def as_recipe(recipe, options):
    """A recipe by its name and options, or as it is."""
    if isinstance(recipe, Recipe):
        if options:
            raise _lowp.LowpError(f"options {sorted(options)} were given with {recipe!r}, which already has options; give the name of the recipe and the options")
        return recipe
    if not isinstance(recipe, str):
        raise _lowp.LowpError(f"{recipe!r} is not a recipe; give a name of lowp.recipes(), or a lowp.Recipe")
    return Recipe(recipe, **options)

"""`qdeploy recipes`: what ships."""

from __future__ import annotations

from rich.table import Table

from qdeploy.cli.console import print_json, run, stdout
from qdeploy.cli.options import Json


def recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""

    def body() -> None:
        from qdeploy.recipes import load_recipe, recipe_names

        loaded = {name: load_recipe(name) for name in recipe_names()}
        if as_json:
            print_json({name: recipe.model_dump() for name, recipe in loaded.items()})
            return
        table = Table("recipe", "model", "method", "weights", "KV cache")
        for name, recipe in loaded.items():
            shape = "sym" if recipe.symmetric else "asym"
            weights = f"W{recipe.bits} {shape}, group {recipe.group_size}"
            table.add_row(
                name, recipe.model or "", recipe.method, weights, recipe.kv_cache.config().label
            )
        stdout.print(table)

    run(body)

"""The recipes that come with dgcompile: a YAML file each, see ``dgcompile.recipe``."""

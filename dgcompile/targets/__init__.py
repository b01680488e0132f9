"""The targets that come with dgcompile: a YAML file of facts each, see ``dgcompile.target``."""

"""The built-in specs, one YAML file a model."""

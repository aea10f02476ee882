"""The spec stage: one YAML file to a frozen, validated `Spec`. Imports neither JAX nor any later stage."""

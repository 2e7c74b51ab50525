"""The commands of `paged`, one module for each group. A module adds its parsers and runs its commands."""

# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The list of packages, which pyproject.toml cannot express; everything else is declared there."""

from setuptools import find_namespace_packages, find_packages, setup

# The recipes live at the root, where people look for them, and are installed as `trl_stabledrl/recipes`.
recipes = find_namespace_packages(include=["recipes", "recipes.*"])

setup(
    packages=[
        *find_packages(include=["trl_stabledrl", "trl_stabledrl.*"]),
        *(f"trl_stabledrl.{folder}" for folder in recipes),
    ],
    package_dir={"trl_stabledrl.recipes": "recipes"},
    package_data={"": ["*.html", "*.yaml", "py.typed"]},
)

#!/usr/bin/env bash
# Build the documentation site from docs/ and the docstrings into site/; fails on a dead link,
# a missing page or a docstring that cannot be read.
#
#   bash tools/docs.sh            build
#   bash tools/docs.sh serve      build, serve on http://127.0.0.1:8000, rebuild on changes
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export NO_MKDOCS_2_WARNING=1 # its advertisement of a successor
MKDOCS=("${MEGATRON_RL_VENV:-.venv}/bin/python" -m mkdocs)
case ${1:-build} in
    build) exec "${MKDOCS[@]}" build --strict ;;
    serve) exec "${MKDOCS[@]}" serve ;;
    *) echo "usage: bash tools/docs.sh [build|serve]" >&2; exit 2 ;;
esac

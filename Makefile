.DEFAULT_GOAL := help
.PHONY: help setup lock check test test-slow demo bench

help: ## Show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[36m%-10s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install everything: system packages, Python environment, machine image
	@tools/setup

lock: ## Compile the hashed lock files anew
	@tools/lock

check: ## Lint, types, import rules
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

test: check ## Check, then run every test but the slow ones
	@tools/setup --tests
	.venv/bin/pytest -m 'not slow' --required tests/required.txt

test-slow: ## Run the soak tests
	.venv/bin/pytest -m slow

demo: ## Runs in sandboxes, then jobs over HTTP, to the zip
	@tools/demo

bench: ## Measure machines and jobs beside the peers on this host
	.venv/bin/python benchmarks/sandbox.py
	.venv/bin/python benchmarks/jobs.py

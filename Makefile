# Every target sets up what it needs by itself, from a bare clone.
# demo and test are the two commands of the README. check takes two minutes and needs no servers.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check lint types unit model bench setup format clean

demo: setup
	$(BIN)/poundlock demo

test: check
	scripts/tests

check: lint types unit model

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

unit: setup
	$(BIN)/python -m pytest -q tests/unit tests/flink

model: setup
	$(BIN)/python -m pytest -q tests/model

bench: setup
	$(BIN)/python -m benchmarks.kafka
	$(BIN)/python -m benchmarks.postgres
	$(BIN)/python -m benchmarks.mysql
	$(BIN)/python -m benchmarks.streams
	$(BIN)/python -m benchmarks.cep

# Is this version slower than another commit? Not part of test.
BEFORE ?= HEAD~1
.PHONY: versions
versions: setup
	$(BIN)/python -m benchmarks.versions $(BEFORE)

# Runs the scenarios on Flink itself again. Needs a download of 400 MB and a JDK. Not part of test.
.PHONY: flink
flink: setup .venv-flink/.ready
	.venv-flink/bin/python tests/flink/flink_run.py build/flink
	FLINK_ANSWERS=build/flink $(BIN)/python -m pytest -q tests/flink

# Runs the MySQL sink's tests on MySQL itself, from Debian's unstable packages. Not part of test.
.PHONY: mysql
mysql: setup
	scripts/mysql
	POUNDLOCK_TEST_MYSQLD=build/mysql/mysqld $(BIN)/python -m pytest tests/sinks/test_mysql_*.py tests/compliance -k mysql

# One decision over 3,000 branches in Kafka and 3,000 in PostgreSQL. A quarter of an hour. Not part of test.
.PHONY: wide
wide: setup
	$(BIN)/python -m pytest -s tests/wide

# Every value of every Spark type through every sink, in three time zones. Not part of test.
.PHONY: fidelity
fidelity: setup
	$(BIN)/python -m pytest tests/fidelity

.venv-flink/.ready: tests/flink/requirements.txt
	$(PYTHON) -m venv .venv-flink
	.venv-flink/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)
	@scripts/java

$(READY): pyproject.toml requirements.lock requirements-build.lock scripts/venv
	scripts/venv $(PYTHON)
	@touch $(READY)

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis

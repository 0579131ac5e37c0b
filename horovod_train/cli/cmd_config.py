"""``horovod-train config``."""

from __future__ import annotations

import json

import click

from horovod_train.cli.options import job_argument, set_option
from horovod_train.config.shipped import job_file


@click.group(name="config")
def command() -> None:
    """Show, check and describe job descriptions."""


@command.command()
@job_argument
@set_option
def show(job: str, overrides: tuple[str, ...]) -> None:
    """Print JOB with all fields, as a rank receives it."""
    import yaml

    from horovod_train.config.load import load_job

    document = load_job(job_file(job), overrides).model_dump(mode="json")
    click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


@command.command()
@job_argument
@set_option
def validate(job: str, overrides: tuple[str, ...]) -> None:
    """Check JOB, and report all problems."""
    from horovod_train.config.load import load_job

    path = job_file(job)
    load_job(path, overrides)
    click.echo(f"{path}: valid")


@command.command()
def schema() -> None:
    """Print the JSON schema of job descriptions, for editors."""
    from horovod_train.config.arguments import job_schema

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **job_schema()}
    click.echo(json.dumps(document, indent=2))

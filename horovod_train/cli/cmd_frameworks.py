"""``horovod-train frameworks``."""

from __future__ import annotations

import click


@click.command(name="frameworks")
def command() -> None:
    """Show the frameworks, their installed versions and refused fields, without importing frameworks."""
    from horovod_train.config.support import framework_support
    from horovod_train.registry import FRAMEWORKS

    click.echo(f"{'framework':<14}{'installed':<14}{'tested with':<14}loop")
    for name in sorted(FRAMEWORKS.rows):
        support = framework_support(name)
        if not support.factory:
            click.echo(f"{name:<14}from another package: {FRAMEWORKS.rows[name]}")
            continue
        click.echo(f"{name:<14}{_installed(support.distributions):<14}{support.tested:<14}{support.loop}")
        for refused in support.refused:
            click.echo(f"    refuses {refused.field}: {refused.reason}")
        if support.note:
            click.echo(f"    {support.note}")


def _installed(distributions: tuple[str, ...]) -> str:
    from importlib import metadata

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "-"

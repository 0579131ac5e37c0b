"""The tests that `make test` runs: they need the packages of `make train` and of pytest, and no others."""

from __future__ import annotations

OTHER_PACKAGES = {  # files of unit tests that need another framework, a tracker, or the client of Kubernetes
    "test_api_contract.py",
    "test_dashboards.py",
    "test_docs.py",
    "test_doctor_kubernetes.py",
    "test_extras.py",
    "test_jax_in_place.py",
    "test_jax_state.py",
    "test_keras_jobs.py",
    "test_kustomize.py",
    "test_loss_comparison.py",
    "test_mpijob_client.py",
    "test_mpijob_launcher.py",
    "test_mpijobs.py",
    "test_remote_files.py",
    "test_sources.py",
    "test_tasks.py",
    "test_tracker_files.py",
}
OTHER_TESTS = (  # tests of other files that do
    "tests/unit/test_deepspeed.py::TestIsRefused::test_a_model_that_is_not_in_float32",
    "tests/unit/test_gpu_defaults.py::test_lightning_takes",
    "tests/unit/test_gpu_defaults.py::test_several_gpus_are_not_several",
    "tests/unit/test_imports.py::test_an_adapter_imports",
    "tests/unit/test_shard.py::test_batches_of_a_trainer_have_the_lengths_of_its_steps",
    "tests/unit/test_nothing_waits.py::test_in_a_trainer_of_somebody_else",
)
RANKS = (  # of the tests that start ranks, the strongest of each promise
    "tests/ranks/test_batch_equality.py::TestEveryWayToTrain",
    "tests/ranks/test_failures.py::TestTheWorld",
    "tests/ranks/test_failures.py::test_a_killed_rank",
    "tests/ranks/test_failures.py::test_a_loss_that_is_not_a_number",
    "tests/ranks/test_failures.py::test_a_run_killed_with_9",
    "tests/ranks/test_failures.py::test_an_error_in_the_task",
    "tests/ranks/test_failures.py::test_ranks_that_have_drifted_apart",
    "tests/ranks/test_frozen.py::test_a_stopped_rank_is_named",
    "tests/ranks/test_library.py::test_an_own_loop_saves",
    "tests/ranks/test_metrics.py::test_each_rank_tells",
    "tests/ranks/test_preemption.py::test_a_run_that_is_asked_to_leave",
    "tests/ranks/test_preemption.py::test_one_rank_that_is_asked",
    "tests/ranks/test_resume.py::",
    "tests/ranks/test_run.py::test_a_run_on_one_machine_listens_on_loopback_only",
    "tests/ranks/test_run.py::test_one_rank_trains_without_horovod",
    "tests/ranks/test_strategies.py::TestEveryStrategy",
)
OTHER_FRAMEWORKS = ("tensorflow", "keras", "jax", "lightning", "transformers", "mxnet", "deepspeed")


def has_core(file: str) -> bool:
    """Return whether `make test` runs tests of a file."""
    if file.startswith("tests/unit/"):
        return file.rpartition("/")[2] not in OTHER_PACKAGES
    return any(each.startswith(f"{file}::") for each in RANKS)


def is_core(nodeid: str) -> bool:
    """Return whether `make test` runs a test."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/unit/"):
        return has_core(file) and not nodeid.startswith(OTHER_TESTS)
    return nodeid.startswith(RANKS) and not any(name in nodeid for name in OTHER_FRAMEWORKS)

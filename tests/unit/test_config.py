"""A job description is checked at the door: every problem at once, never a traceback."""

from __future__ import annotations

import copy
import io
import json
import random
import string
from contextlib import redirect_stderr, redirect_stdout

import jsonschema
import pytest
import yaml

from horovod_train.cli import main as cli_main
from horovod_train.config.load import _as_path, dump_job, load_job
from horovod_train.config.optimization import LearningRate
from horovod_train.config.problems import shorten
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError

VALID = {
    "name": "job",
    "task": "digits",
    "train": {"epochs": 3, "batch_size_per_rank": 8, "precision": "bf16"},
    "optimizer": {"name": "adamw", "args": {"betas": [0.9, 0.95]}},
    "lr": {"base_lr": 0.1, "decay": "cosine", "warmup": 1},
    "launch": {"num_ranks": 2, "hosts": ["a:1", "b:1"], "network_interface": "eth0"},
}


def job_file(tmp_path, document, name="job.yaml"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def problems(tmp_path, document, overrides=(), environ=None):
    """Return {path: whole problem text} of a broken job."""
    with pytest.raises(ConfigError) as caught:
        load_job(job_file(tmp_path, document), overrides, environ or {})
    return {problem.path: str(problem) for problem in caught.value.problems}


def changed(**sections):
    document = copy.deepcopy(VALID)
    for name, fields in sections.items():
        document[name] = {**document.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return document


class TestReading:
    def test_a_valid_job_is_read(self, tmp_path):
        job = load_job(job_file(tmp_path, VALID), environ={})

        assert (job.name, job.train.epochs, job.launch.hosts) == ("job", 3, ["a:1", "b:1"])

    def test_toml_says_the_same_as_yaml(self, tmp_path):
        toml = 'name = "job"\ntask = "digits"\n[train]\nepochs = 3\n[lr]\nbase_lr = 1e-3\n'
        document = "name: job\ntask: digits\ntrain: {epochs: 3}\nlr: {base_lr: 1e-3}\n"

        assert load_job(job_file(tmp_path, toml, "job.toml"), environ={}) == load_job(
            job_file(tmp_path, document), environ={}
        )

    def test_a_resolved_job_reads_back_as_itself(self, tmp_path):
        job = load_job(job_file(tmp_path, VALID), environ={})

        assert load_job(job_file(tmp_path, dump_job(job), "job.json"), environ={}) == job

    def test_file_gives_way_to_environment_and_environment_to_flags(self, tmp_path):
        path = job_file(tmp_path, VALID)
        environ = {"HOROVOD_TRAIN__TRAIN__EPOCHS": "5", "HOROVOD_TRAIN__TRAIN__SEED": "9"}

        job = load_job(path, ["train.epochs=7"], environ)

        assert (job.train.epochs, job.train.seed, job.train.batch_size_per_rank) == (7, 9, 8)

    def test_numbers_in_scientific_notation_are_numbers(self, tmp_path):
        job = load_job(job_file(tmp_path, "name: j\ntask: digits\nlr: {base_lr: 1e-3}"), environ={})

        assert job.lr.base_lr == 0.001

    def test_the_path_of_a_task_starts_at_the_folder_of_the_job(self, tmp_path):
        (tmp_path / "mine.py").write_text("class Task: ...\n")
        job = load_job(job_file(tmp_path, {"name": "j", "task": "mine.py:Task"}), environ={})

        assert job.task == f"{tmp_path / 'mine.py'}:Task"

    @pytest.mark.parametrize("task", ["digits", "package.module:Class", "py:Class"])
    def test_the_name_of_a_task_is_no_path(self, tmp_path, task):
        assert load_job(job_file(tmp_path, {"name": "j", "task": task}), environ={}).task == task

    def test_variables_for_ranks_keep_their_names(self, tmp_path):
        environ = {
            "HOROVOD_TRAIN__LAUNCH__ENV__OMP_PROC_BIND": "close",
            "HOROVOD_TRAIN__LAUNCH__ENV__MY__OWN": "1x",
            "HOROVOD_TRAIN__LAUNCH__SECRETS__API_TOKEN": "env:TOKEN",
            "HOROVOD_TRAIN__OPTIMIZER__ARGS__WEIGHT_DECAY": "0.1",
        }

        job = load_job(job_file(tmp_path, VALID), environ=environ)

        assert job.launch.env == {"OMP_PROC_BIND": "close", "MY__OWN": "1x"}
        assert job.launch.secrets == {"API_TOKEN": "env:TOKEN"}
        assert job.optimizer.args["weight_decay"] == 0.1

    def test_a_task_behind_a_link_keeps_the_name_that_all_hosts_know(self, tmp_path):
        """A kubelet mounts files of a ConfigMap as links into a folder of another name in each pod."""
        real = tmp_path / "..2026_11_22_10_00_00.4711"
        real.mkdir()
        (real / "mine.py").write_text("class Task: ...\n")
        job_file(real, changed(task="mine.py:Task"))
        (tmp_path / "..data").symlink_to(real.name)
        for name in ("mine.py", "job.yaml"):
            (tmp_path / name).symlink_to(f"..data/{name}")

        job = load_job(tmp_path / "job.yaml", environ={})

        assert job.task == f"{tmp_path}/mine.py:Task"

    @pytest.mark.parametrize("section", [{"train": {"epochs": 2}}, {"ema": {"decay": 0.9}}])
    def test_a_script_has_no_sections_that_it_decides(self, tmp_path, section):
        (tmp_path / "train.py").write_text("print()\n")
        document = {"name": "s", "framework": "script", "task": "train.py:__main__", **section}

        with pytest.raises(ConfigError, match="is not for scripts, which decide it themselves"):
            load_job(job_file(tmp_path, document), environ={})

    def test_a_script_has_the_defaults_of_sections_that_it_decides(self, tmp_path):
        (tmp_path / "train.py").write_text("print()\n")
        document = {"name": "s", "framework": "script", "task": "train.py:__main__"}

        assert load_job(job_file(tmp_path, document), environ={}).lr == LearningRate()

    @pytest.mark.parametrize(
        ("content", "is_there"),
        [
            ("class Task: ...", True),
            ("class Other: ...\ndef task(): ...", False),
            ("def make():\n    global Task\n    Task = 1", True),
            ("if True:\n    class Task: ...", True),
            ("Other = Task = None", True),
            ("from other import Task", True),
            ("from other import X as Task", True),
            ("from other import Task as X", False),
            ("from other import *", True),
            ("globals()['Ta' + 'sk'] = 1", True),
            ("vars()['Task'] = 1", True),
            ("import sys\nsys.modules[__name__].__dict__['Task'] = 1", True),
            ("def __getattr__(name): ...", True),
            ("class Task", True),
        ],
    )
    def test_a_file_is_not_run_to_see_whether_it_defines_a_task(self, tmp_path, content, is_there):
        (tmp_path / "mine.py").write_text(content)
        path = job_file(tmp_path, changed(task="mine.py:Task"))

        if is_there:
            assert load_job(path, environ={}).task == f"{tmp_path}/mine.py:Task"
        else:
            assert "does not define Task" in problems(tmp_path, changed(task="mine.py:Task"))["task"]

    def test_a_task_that_only_the_image_has_is_left_to_kubernetes(self, tmp_path):
        launch = {"launcher": "mpijob", "hosts": [], "kubernetes": {"image": "train:1.0"}, "num_ranks": 1}
        document = changed(task="/opt/train/mine.py:Task", run_dir="/data", launch=launch)
        document["launch"].pop("network_interface")
        document["launch"]["kubernetes"]["volumes"] = [{"claim": "data", "mount_path": "/data"}]

        assert load_job(job_file(tmp_path, document), environ={}).task == "/opt/train/mine.py:Task"
        assert "no such file" in problems(tmp_path, {**document, "task": "mine.py:Task"})["task"]
        document["launch"]["launcher"] = "horovodrun"
        assert "no such file" in problems(tmp_path, document)["task"]

    def test_the_json_schema_accepts_what_we_accept(self):
        jsonschema.validate(VALID, Job.model_json_schema())

    def test_the_json_schema_describes_every_field(self):
        def undescribed(schema, path=""):
            for name, field in schema.get("properties", {}).items():
                if "description" not in field and "$ref" not in field:
                    yield f"{path}{name}"

        schema = Job.model_json_schema()
        found = [*undescribed(schema), *(n for d in schema["$defs"].values() for n in undescribed(d))]
        assert found == []


class TestProblems:
    def test_an_unknown_field_is_named_with_its_neighbour(self, tmp_path):
        found = problems(tmp_path, changed(train={"epcohs": 3}))

        assert "did you mean 'epochs'?" in found["train.epcohs"]

    def test_values_and_what_is_allowed_are_shown(self, tmp_path):
        found = problems(
            tmp_path, changed(train={"batch_size_per_rank": 0, "precision": "fp8", "epochs": "4"})
        )

        assert "= 0\n      must be at least 1" in found["train.batch_size_per_rank"]
        assert "'fp32', 'bf16' or 'fp16'" in found["train.precision"]
        assert "without quotes" in found["train.epochs"]

    def test_everything_wrong_is_reported_at_once(self, tmp_path):
        document = changed(
            train={"epochs": -1, "nonsense": 1},
            optimizer={"args": {"lr": 0.1}},
            lr={"decay_args": {"gamma": 0.5}, "base_lr": "fast"},
            launch={"num_ranks": 9},
        )
        document["health"] = {"stall_warning_s": 1000}

        found = problems(tmp_path, document, ["broken"])

        assert set(found) == {
            "--set",
            "train.epochs",
            "train.nonsense",
            "optimizer.args.lr",
            "lr.decay_args.gamma",
            "lr.base_lr",
            "launch.num_ranks",
            "health.stall_shutdown_s",
        }

    @pytest.mark.parametrize(
        ("sections", "path"),
        [
            ({"optimizer": {"name": "adamww"}}, "optimizer.name"),
            ({"task": "digitz"}, "task"),
            ({"task": "missing.py:Task"}, "task"),
            ({"framework": "pytorch"}, "framework"),
            ({"launch": {"launcher": "slurmm"}}, "launch.launcher"),
            ({"launch": {"hosts": ["a:1", "a:2"], "num_ranks": 2}}, "launch.hosts"),
            ({"launch": {"launcher": "local"}}, "launch.launcher"),
            ({"lr": {"warmup": 4}}, "lr.warmup"),
            ({"lr": {"warmup": 0, "warmup_start_lr": 0.1}}, "lr.warmup_start_lr"),
            ({"lr": {"decay": "step", "decay_args": {"milestones": []}}}, "lr.decay_args.milestones"),
            ({"lr": {"decay": "step", "decay_args": {"milestones": [2, 1]}}}, "lr.decay_args.milestones"),
            ({"metrics": {"port": 65535}, "launch": {"hosts": [], "num_ranks": 2}}, "metrics.port"),
            ({"train": {"deterministic": True, "compile": {}}}, "train.compile.backend"),
            ({"health": {"stall_shutdown_s": 5}}, "health.stall_shutdown_s"),
            ({"strategy": {"name": "local-sdg"}}, "strategy.name"),
            ({"strategy": {"name": "local_sgd"}, "framework": "jax"}, "strategy"),
            ({"strategy": {"args": {"every_steps": 2}}, "framework": "keras"}, "strategy"),
            ({"allreduce": {"codec": {"name": "topk"}}}, "allreduce.codec.name"),
            ({"allreduce": {"codec": {"name": "top-k"}}, "framework": "jax"}, "allreduce.codec"),
            (
                {"allreduce": {"codec": {"name": "top-k"}}, "strategy": {"name": "local_sgd"}},
                "allreduce.codec",
            ),
            (
                {"allreduce": {"codec": {"name": "top-k"}, "wire_dtype": "fp16"}},
                "allreduce.wire_dtype",
            ),
            ({"launch": {"host_settings": {"c": {"python": "/opt/python"}}}}, "launch.host_settings.c"),
            ({"launch": {"elastic": {"min_ranks": 9}}}, "launch.elastic"),
            (
                {"launch": {"hosts": [], "num_ranks": None, "elastic": {"min_ranks": 1}}},
                "launch.elastic.max_ranks",
            ),
            (
                {"launch": {"hosts": ["a:1", "b:1"], "elastic": {"min_ranks": 1, "discover": "cat hosts"}}},
                "launch.elastic.discover",
            ),
            (
                {"launch": {"elastic": {"min_ranks": 1}}, "checkpoint": {"resume": "never"}},
                "checkpoint.resume",
            ),
            ({"launch": {"elastic": {"min_ranks": 1}, "launcher": "slurm"}}, "launch.elastic"),
            ({"launch": {"env": {"A": "1"}, "secrets": {"A": "env:A"}}}, "launch.env.A"),
            ({"launch": {"secrets": {"A": "hunter2"}}}, "launch.secrets.A"),
            ({"launch": {"ssh": {"options": {"ProxyJump": "a\nUser root"}}}}, "launch.ssh.options.ProxyJump"),
            ({"optimizer": {"name": ":SGD"}}, "optimizer.name"),
        ],
    )
    def test_combinations_that_cannot_work_are_found(self, tmp_path, sections, path):
        assert path in problems(tmp_path, changed(**sections))

    @pytest.mark.parametrize(
        "sections",
        [
            {"metrics": {"port": 65534}, "launch": {"hosts": [], "num_ranks": 2}},
            {"metrics": {"port": 65532}, "launch": {"hosts": ["a:4", "b:1"], "num_ranks": 5}},
            {"lr": {"warmup": 3}},
            {"launch": {"num_ranks": 2, "elastic": {"min_ranks": 2}}},
            {"launch": {"hosts": [], "num_ranks": None, "elastic": {"min_ranks": 1, "max_ranks": 1}}},
            {"launch": {"hosts": [], "num_ranks": 2, "elastic": {"min_ranks": 1}}},
            {"launch": {"elastic": {"min_ranks": 1}}},
            {"health": {"stall_warning_s": 5, "stall_shutdown_s": 5.5}},
            {"launch": {"hosts": [], "num_ranks": 1, "launcher": "local"}},
            {"launch": {"hosts": [], "num_ranks": None, "launcher": "local"}},
        ],
    )
    def test_what_just_fits_is_allowed(self, tmp_path, sections):
        assert load_job(job_file(tmp_path, changed(**sections)), environ={})

    def test_the_highest_port_that_fits_is_named(self, tmp_path):
        sections = {"metrics": {"port": 65535}, "launch": {"hosts": [], "num_ranks": 3}}

        assert "use at most 65533" in problems(tmp_path, changed(**sections))["metrics.port"]

    @pytest.mark.parametrize(
        ("discover", "is_command"), [("cat 'a b'", True), ("cat 'a", False), ("", False)]
    )
    def test_a_command_that_lists_hosts_can_be_split(self, tmp_path, discover, is_command):
        elastic = {"min_ranks": 1, "max_ranks": 2, "discover": discover}
        sections = {"launch": {"hosts": [], "num_ranks": None, "elastic": elastic}}

        if is_command:
            assert load_job(job_file(tmp_path, changed(**sections)), environ={})
        else:
            assert "launch.elastic.discover" in problems(tmp_path, changed(**sections))

    def test_what_a_rule_says_of_fields_that_could_not_be_read_is_not_said(self, tmp_path):
        """A missing task stands for another one there, and a wrong number of ranks for none."""
        document = changed(launch={"num_ranks": "many"})
        del document["task"]

        assert problems(tmp_path, document).keys() == {"task", "launch.num_ranks"}

    def test_variables_of_ranks_stand_at_the_end_of_a_name(self):
        assert _as_path("LAUNCH__ENV") == "launch.env"
        assert _as_path("LAUNCH__ENV__A__B") == "launch.env.A__B"
        assert _as_path("LAUNCH__SECRETS__DB") == "launch.secrets.DB"

    @pytest.mark.parametrize("length", [57, 58, 59, 200])
    def test_long_values_are_cut_to_one_short_line(self, length):
        text = shorten("x" * length)

        assert text == ('"' + "x" * length + '"' if length <= 58 else '"' + "x" * 56 + "...")

    def test_a_gang_scheduler_and_kueue_do_not_go_together(self, tmp_path):
        def found(**kubernetes):
            launch = {
                "launcher": "mpijob",
                "hosts": [],
                "network_interface": None,
                "kubernetes": {"image": "i:1", **kubernetes},
            }
            try:
                load_job(job_file(tmp_path, changed(launch=launch)), environ={})
            except ConfigError as error:
                return {problem.path for problem in error.problems}
            return set()

        assert "launch.kubernetes.queue" not in found(queue="q") | found(gang="volcano")
        assert "launch.kubernetes.queue" in found(queue="q", gang="volcano")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "- 1",
            "name: [",
            "a: b: c",
            "{",
            "\t",
            "name: job\nname: job",
            "? [1]\n: 2",
            "&a [*a]",
            "1: 2",
            'a: !!int ""',
            "a: !!bool x",
            "a: !!timestamp x",
        ],
    )
    def test_a_file_that_is_no_job_is_explained(self, tmp_path, text):
        assert problems(tmp_path, text)

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"name: \x00", b"\x80abc"])
    def test_a_file_that_is_no_text_is_explained(self, tmp_path, content):
        path = tmp_path / "job.yaml"
        path.write_bytes(content)

        with pytest.raises(ConfigError):
            load_job(path, environ={})

    def test_a_missing_file_and_a_folder_are_explained(self, tmp_path):
        for path in (tmp_path / "none.yaml", tmp_path):
            with pytest.raises(ConfigError):
                load_job(path, environ={})

    @pytest.mark.parametrize(
        "path", ["task", "run_dir", "checkpoint.dir", "metrics.host", "launch.env.A", "task_args.x"]
    )
    def test_a_nul_character_is_refused_wherever_it_stands(self, tmp_path, path):
        found = problems(tmp_path, VALID, [f'{path}="a\\0b"'])

        assert "must not contain a NUL character" in found[path]

    def test_nor_may_it_stand_in_a_list(self, tmp_path):
        found = problems(tmp_path, changed(task_args={"x": [1, {"y": ["a", "b\0"]}]}))

        assert "must not contain a NUL character" in found["task_args.x.1.y.1"]

    def test_a_name_with_a_nul_character_is_refused(self, tmp_path):
        assert "NUL" in problems(tmp_path, changed(task_args={"a\0b": 1}))["task_args"]

    def test_a_path_that_is_too_deep_is_refused(self, tmp_path):
        assert "has more than 32 levels" in problems(tmp_path, VALID, ["a." * 300 + "b=1"])["--set"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("name: a\ntask: digits\nname: b\n", "the key 'name' is given twice"),
            ("name: a\ntask: digits\ntrain: {epochs: 1, epochs: 2}\n", "the key 'epochs' is given twice"),
            ("name: a\ntask: digits\ntask_args: {1: x}\n", "the key 1 must be a text"),
        ],
    )
    def test_a_key_given_twice_or_that_is_no_text_is_refused(self, tmp_path, text, said):
        with pytest.raises(ConfigError, match=said):
            load_job(job_file(tmp_path, text), environ={})

    def test_a_key_given_twice_is_refused_in_json_too(self, tmp_path):
        path = job_file(tmp_path, '{"name": "a", "task": "digits", "name": "b"}', "job.json")

        with pytest.raises(ConfigError, match="the key 'name' is given twice"):
            load_job(path, environ={})

    @pytest.mark.timeout(100)
    def test_sixty_thousand_keys_are_not_compared_each_with_each(self, tmp_path):
        text = "name: a\ntask: digits\ntask_args:\n" + "".join(f"  k{n}: 1\n" for n in range(60_000))

        assert len(load_job(job_file(tmp_path, text), environ={}).task_args) == 60_000

    def test_of_an_unknown_framework_only_that_is_said(self, tmp_path):
        assert problems(tmp_path, changed(framework="teh")).keys() == {"framework"}

    def test_deep_nesting_is_refused(self, tmp_path):
        assert problems(tmp_path, "task_args: " + "[" * 2000 + "]" * 2000)

    def test_a_bomb_of_aliases_is_defused(self, tmp_path):
        lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]

        assert problems(tmp_path, "\n".join(lines))

    def test_a_job_may_live_in_a_folder_of_any_name(self, tmp_path):
        folder = tmp_path / "lr=3 @home, c++ (new)"
        folder.mkdir()
        (folder / "mine.py").write_text("class Task: ...\n")

        assert load_job(job_file(folder, {"name": "j", "task": "mine.py:Task"}), environ={}).task

    def test_a_broken_environment_variable_is_named(self, tmp_path):
        found = problems(
            tmp_path, VALID, environ={"HOROVOD_TRAIN__TRAIN__EPOCHS": "[", "HOROVOD_TRAIN__X": "1"}
        )

        assert set(found) == {"train.epochs", "x"}


def broken_jobs(count):
    """Yield jobs that are each broken in one to three ways, surely."""
    rng = random.Random(20261121)
    numbers = [("train", "epochs"), ("train", "batch_size_per_rank"), ("lr", "base_lr"), ("metrics", "port"),
               ("checkpoint", "keep_last"), ("launch", "num_ranks"), ("health", "stall_warning_s"),
               ("train", "seed"), ("allreduce", "bucket_size_mib"), ("data", "num_workers")]  # fmt: skip
    choices = [("train", "precision"), ("train", "device"), ("lr", "scaling"), ("lr", "decay"),
               ("allreduce", "wire_dtype"), ("checkpoint", "resume"), ("launch", "controller")]  # fmt: skip
    bad_numbers = [
        -1,
        -0.5,
        10**30,
        "x",
        "3",
        [],
        {},
        None.__class__.__name__,
        True,
        float("nan"),
        float("inf"),
    ]
    bad_choices = ["", "FP32", 0, 1.5, [], {}, "none of these", True]
    junk = [0, 1.5, "text", [1], True]

    def word():
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(6, 12)))

    def break_once(job):
        kind = rng.randrange(7)
        if kind == 0:
            section, field = rng.choice(numbers)
            job.setdefault(section, {})
            if isinstance(job[section], dict):
                job[section][field] = rng.choice(bad_numbers)
        elif kind == 1:
            section, field = rng.choice(choices)
            job.setdefault(section, {})
            if isinstance(job[section], dict):
                job[section][field] = rng.choice(bad_choices)
        elif kind == 2:
            job[word()] = rng.choice(junk)
        elif kind == 3:
            section = rng.choice(["train", "optimizer", "lr", "launch", "data", "health", "metrics"])
            if isinstance(job.setdefault(section, {}), dict):
                job[section][word()] = rng.choice(junk)
        elif kind == 4:
            job[rng.choice(["train", "lr", "launch", "data", "allreduce", "evaluation"])] = rng.choice(junk)
        elif kind == 5:
            job.pop(rng.choice(["name", "task"]), None)
        else:
            job["launch"] = {"hosts": [rng.choice(["a", "a:0", ":3", "a:x", "a b:1", "", 5])]}

    for _ in range(count):
        job = copy.deepcopy(VALID)
        for _ in range(rng.randint(1, 3)):
            break_once(job)
        yield job


def run_cli(monkeypatch, *arguments):
    """Run the command line in this process: (exit code, output)."""
    monkeypatch.setattr("sys.argv", ["horovod-train", *arguments])
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as left:
        cli_main.main()
    return left.value.code, output.getvalue()


def test_a_thousand_broken_jobs_are_each_refused_with_code_2_and_no_traceback(tmp_path, monkeypatch):
    for number, document in enumerate(broken_jobs(1000)):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(document))

        code, output = run_cli(monkeypatch, "config", "validate", str(path))

        assert code == 2, f"job {number} passed: {document}\n{output}"
        assert "problem" in output
        assert "Traceback" not in output


def test_a_thousand_mangled_files_never_end_in_a_traceback(tmp_path, monkeypatch):
    rng = random.Random(7)
    original = yaml.safe_dump(VALID).encode()
    for _ in range(1000):
        mangled = bytearray(original)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(mangled))
            mangled[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
        path = tmp_path / "job.yaml"
        path.write_bytes(mangled)

        code, output = run_cli(monkeypatch, "config", "validate", str(path))

        assert code in (0, 2), output
        assert "Traceback" not in output

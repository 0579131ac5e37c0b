"""What is said of a wrong field: whole texts, since a person has nothing else."""

from __future__ import annotations

import json

import pytest
from unit.test_config import VALID, changed, job_file, problems

from horovod_train.config import load as module
from horovod_train.config.load import load_job
from horovod_train.config.problems import _fields_at, _is_quoted_number, shorten
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError

ON_KUBERNETES = {"launcher": "mpijob", "hosts": [], "network_interface": None}


def on_kubernetes(num_ranks=2, **settings):
    return {"launch": {**ON_KUBERNETES, "num_ranks": num_ranks, "kubernetes": {"image": "i:1", **settings}}}


FSDP = "PyTorch reduce-scatters gradients during the backward pass"
CODEC = "the sum of compressed gradients is not the mean of the ranks' gradients"
SCHEDULES = (
    "constant, cosine, cosine_restarts, inverse_sqrt, one_cycle, plateau, points, polynomial, step, wsd"
)
SAID = [
    # Rules between fields.
    (
        {"lr": {"decay_args": {"gamma": 0.5}}},
        "lr.decay_args.gamma = 0.5",
        "is not a known field",
        "it belongs to decay: step",
    ),
    (
        {"lr": {"decay": "constant", "decay_args": {"end_factor": 0.5}}},
        "lr.decay_args.end_factor = 0.5",
        "is not a known field",
        "it belongs to decay: cosine or cosine_restarts or polynomial or wsd or one_cycle",
    ),
    (
        {"lr": {"decay": "cosine", "end_factor": 0.5}},
        "lr.end_factor = 0.5",
        "is not a known field",
        "did you mean lr.decay_args.end_factor?",
    ),
    (
        {"strategy": {"name": "zero", "stage": 1}},
        "strategy.stage = 1",
        "is not a known field",
        "did you mean strategy.args.stage?",
    ),
    (
        {"lr": {"decay": "plateau", "decay_args": {"mode": "min"}}},
        "lr.decay_args.metric",
        "is required",
        "",
    ),
    (
        {"lr": {"decay": "inverse_sqrt", "warmup": 0.0}},
        "lr.warmup",
        "decay: inverse_sqrt needs a warm-up, whose length is its time scale",
        "such as 5 epochs",
    ),
    (
        {"lr": {"decay": "one_cycle", "warmup": 1.0}},
        "lr.warmup = 1 epoch",
        "decay: one_cycle contains the rise of the rate",
        "leave it out; set lr.decay_args.rise_fraction",
    ),
    (
        {"lr": {"decay": "points", "decay_args": {"points": [[2, 1.0], [1, 0.5]]}}},
        "lr.decay_args.points = [[2, 1.0], [1, 0.5]]",
        "must have increasing positions",
        "",
    ),
    (
        {"lr": {"decay": "cosin"}},
        "lr.decay = 'cosin'",
        f"is not a known schedule; known: {SCHEDULES}",
        "did you mean 'cosine'?",
    ),
    (
        {"lr": {"scaling": "lwgw"}},
        "lr.scaling = 'lwgw'",
        "is not a known scaling rule; known: adam_sqrt, adascale, legw, linear, none, sqrt",
        "did you mean 'legw'?",
    ),
    (
        {"optimizer": {"name": "pytorch_optimizer:Muon", "args": {}}},
        "lr.scaling",
        "must be set: no scaling rule is established for optimizer pytorch_optimizer:Muon",
        (
            "none, if base_lr is tuned for the global batch; otherwise sqrt or linear, which `horovod-train "
            "study` compares"
        ),
    ),
    (
        {"lr": {"scaling": "adascale"}, "optimizer": {"name": "adamw", "args": {}}},
        "optimizer.name = 'adamw'",
        "lr.scaling: adascale is derived for SGD with momentum",
        "use sgd, or lr.scaling: sqrt or adam_sqrt",
    ),
    (
        {"lr": {"scaling": "adascale"}, "strategy": "fsdp"},
        "lr.scaling = 'adascale'",
        f"is not supported with strategy: fsdp: adascale: {FSDP}",
        "use another rule",
    ),
    (
        {"metrics": {"noise_scale_every_steps": 10}, "allreduce": {"codec": {"name": "powersgd"}}},
        "metrics.noise_scale_every_steps = 10",
        f"cannot be combined with allreduce.codec: {CODEC}",
        "leave the codec out",
    ),
    (
        {"metrics": {"noise_scale_groups": True}},
        "metrics.noise_scale_groups = True",
        "has no effect without metrics.noise_scale_every_steps",
        "set both",
    ),
    (
        {"optimizer": {"schedules": {"lr": [[0, 1.0]]}}},
        "optimizer.schedules.lr",
        "the learning rate has its own schedule",
        "use lr.decay",
    ),
    (
        {"optimizer": {"schedules": {"momentum": []}}},
        "optimizer.schedules.momentum = []",
        "must be a list of [position, value]",
        "",
    ),
    (
        {"lr": {"scaling": "legw", "warmup": 0.0}},
        "lr.warmup = 0",
        "lr.scaling: legw lengthens the warm-up with the global batch, and there is none",
        "set the warm-up of the reference batch, or use lr.scaling: sqrt",
    ),
    (
        {"lr": {"momentum_correction": True}, "optimizer": {"name": "adamw", "args": {}}},
        "lr.momentum_correction = True",
        "is a correction for sgd with momentum",
        "leave it out",
    ),
    (
        {"lr": {"decay": "step", "decay_args": {"milestones": []}}},
        "lr.decay_args.milestones = []",
        "must have at least 1",
        "",
    ),
    (
        {"lr": {"decay": "step", "decay_args": {"milestones": [2, 2]}}},
        "lr.decay_args.milestones = [2, 2]",
        "must be strictly increasing",
        "",
    ),
    ({"lr": {"warmup": 3.5}}, "lr.warmup = 3.5 epochs", "must be at most train.epochs = 3", ""),
    (
        {"lr": {"warmup": 0, "warmup_start_lr": 0.25}},
        "lr.warmup_start_lr = 0.25",
        "has no effect without lr.warmup",
        "",
    ),
    (
        {"optimizer": {"args": {"lr": 0.5}}},
        "optimizer.args.lr = 0.5",
        "the learning rate is set in each step and would overwrite this",
        "move it to lr.base_lr",
    ),
    (
        {"task": "digitz"},
        "task = 'digitz'",
        "is not a known task; known: digits, gpt, vit-digits",
        "did you mean 'digits'?",
    ),
    (
        {"launch": {"launcher": "slurmm"}},
        "launch.launcher = 'slurmm'",
        (
            "is not a known launcher; known: flux, flux-allocation, gridengine, gridengine-allocation, "
            "horovodrun, local, lsf, lsf-allocation, mpijob, mpirun, pbs, pbs-allocation, slurm, "
            "slurm-allocation"
        ),
        "did you mean 'slurm'?",
    ),
    (
        {"launch": {"hosts": ["a:1", "b:1", "a:2"], "num_ranks": 2}},
        "launch.hosts = ['a:1', 'b:1', 'a:2']",
        "names a more than once",
        "",
    ),
    (
        {"launch": {"num_ranks": 3}},
        "launch.num_ranks = 3",
        "must be at most the 2 slots of launch.hosts",
        "add hosts or slots",
    ),
    (
        {"launch": {"hosts": [], "num_ranks": 2, "launcher": "local"}},
        "launch.launcher = 'local'",
        "starts one rank only",
        "leave it out: auto chooses one",
    ),
    (
        {"launch": {"hosts": ["a:2"], "num_ranks": None, "launcher": "local"}},
        "launch.launcher = 'local'",
        "starts one rank only",
        "leave it out: auto chooses one",
    ),
    (
        {"launch": {"elastic": {"min_ranks": 3}}},
        "launch.elastic = 3 to 2 ranks",
        "does not fit launch.num_ranks = 2",
        "min_ranks <= num_ranks <= max_ranks",
    ),
    (
        {"launch": {"elastic": {"min_ranks": 1, "discover": "cat hosts"}}},
        "launch.elastic.discover = 'cat hosts'",
        "and launch.hosts both name hosts",
        "use one",
    ),
    (
        {"launch": {"hosts": [], "num_ranks": None, "elastic": {"min_ranks": 1}}},
        "launch.elastic.max_ranks = null",
        "is needed where neither num_ranks nor hosts say how many",
        "",
    ),
    (
        {"launch": {"elastic": {"min_ranks": 1}, "launcher": "slurm-allocation"}},
        "launch.elastic",
        "is not for Slurm, whose jobs keep their nodes",
        "leave it out: launch.slurm.requeue puts the job back into the queue",
    ),
    (
        {"launch": {"elastic": {"min_ranks": 1}, "launcher": "pbs"}},
        "launch.elastic",
        "is not for PBS, whose jobs keep their nodes",
        "leave it out: launch.pbs.requeue puts the job back into the queue",
    ),
    (
        {"launch": {"pbs": {"options": ["-J 1-4"]}}},
        "launch.pbs.options = '-J 1-4'",
        "submits a job array, and each of its jobs would be this run",
        "call `horovod-train run --launcher pbs-allocation` in a batch script of yours",
    ),
    (
        {
            "launch": {
                "pbs": {
                    "options": ["-q gpu", "-l walltime=1:00:00", "-l place=excl", "-l mem=4gb,nodes=2:ppn=4"]
                }
            }
        },
        "launch.pbs.options = '-l mem=4gb,nodes=2:ppn=4'",
        "requests nodes, as launch.num_ranks does",
        "use launch.num_ranks, launch.pbs.ranks_per_node and launch.pbs.chunk",
    ),
    (
        {"task": "__main__:Task"},
        "task = '__main__:Task'",
        "is in the program itself, which ranks do not import",
        "put it into a file, and write task: FILE.py:Task",
    ),
    (
        {"task": "../../etc/passwd:X"},
        "task = '../../etc/passwd:X'",
        "'../../etc/passwd' is neither a module nor a file that ends in .py",
        "write module:Class or path/to/file.py:Class",
    ),
    (
        {"launch": {"pbs": {"options": ["-N 'a"]}}},
        'launch.pbs.options = "-N \'a"',
        "cannot be split",
        "close its quotes",
    ),
    (
        {"launch": {"slurm": {"options": {"array": "1-4"}}}},
        "launch.slurm.options = '--array'",
        "submits a job array, and each of its jobs would be this run",
        "call `horovod-train run --launcher slurm-allocation` in a batch script of yours",
    ),
    (
        {"launch": {"slurm": {"mpi": "pmix"}, "controller": "gloo"}},
        "launch.slurm.mpi = 'pmix'",
        "has no effect with launch.controller: gloo",
        "leave it out, or use launch.controller: mpi",
    ),
    (
        {"launch": {"launcher": "gridengine"}},
        "launch.gridengine.parallel_environment = null",
        "is needed for 2 ranks",
        "use one of the parallel environments that `qconf -spl` prints",
    ),
    (
        {"launch": {"launcher": "gridengine-allocation", "controller": "gloo"}},
        "launch.controller = 'gloo'",
        "is not available in Grid Engine, where MPI starts the ranks",
        "use mpi",
    ),
    (
        {"launch": {"launcher": "lsf-allocation", "controller": "gloo"}},
        "launch.controller = 'gloo'",
        "is not available in LSF, where MPI starts the ranks",
        "use mpi",
    ),
    (
        {"launch": {"pbs": {"options": ["-J1-4"]}}},
        "launch.pbs.options = '-J1-4'",
        "submits a job array, and each of its jobs would be this run",
        "call `horovod-train run --launcher pbs-allocation` in a batch script of yours",
    ),
    (
        {"launch": {"gridengine": {"options": ["-t 1-4", "-tc 2"]}}},
        "launch.gridengine.options = '-t 1-4'",
        "submits a job array, and each of its jobs would be this run",
        "call `horovod-train run --launcher gridengine-allocation` in a batch script of yours",
    ),
    (
        {"launch": {"lsf": {"options": ["-J x", "-J x[1-4]"]}}},
        "launch.lsf.options = '-J x[1-4]'",
        "submits a job array, and each of its jobs would be this run",
        "call `horovod-train run --launcher lsf-allocation` in a batch script of yours",
    ),
    (
        {"launch": {"container": {"image": "/a.sif"}, "launcher": "mpijob"}},
        "launch.container = '/a.sif'",
        "is for hosts, and ranks of this launcher have an image of their own",
        "set the image in launch.kubernetes",
    ),
    (
        {"launch": {"elastic": {"min_ranks": 1}}, "checkpoint": {"resume": "never"}},
        "checkpoint.resume = 'never'",
        "would start from the beginning whenever hosts change",
        "use auto with elastic",
    ),
    (
        {"launch": {"host_settings": {"bb": {"python": "/opt/python"}}}},
        "launch.host_settings.bb",
        "is not one of launch.hosts",
        "did you mean 'b'?",
    ),
    (
        {"launch": {"env": {"A": "1"}, "secrets": {"A": "env:A"}}},
        "launch.env.A",
        "is one of launch.secrets as well",
        "keep the secret",
    ),
    (
        {"metrics": {"port": 65535}, "launch": {"hosts": ["a:3", "b:1"]}},
        "metrics.port = 65535",
        "port + local rank exceeds 65535 for 3 ranks on a host",
        "use at most 65533",
    ),
    (
        {"health": {"stall_warning_s": 5, "stall_shutdown_s": 5}},
        "health.stall_shutdown_s = 5",
        "must be greater than health.stall_warning_s = 5",
        "",
    ),
    (
        {"train": {"deterministic": True, "compile": {"backend": "inductor"}}},
        "train.compile.backend = 'inductor'",
        "cannot be combined with train.deterministic",
        "use aot_eager, or set deterministic: false",
    ),
    (
        on_kubernetes(3, ranks_per_worker=2),
        "launch.num_ranks = 3",
        "must be a multiple of launch.kubernetes.ranks_per_worker = 2",
        "",
    ),
    (
        on_kubernetes(host_network=True),
        "launch.kubernetes.ssh_port = 2222",
        "with host_network, two jobs on a node would want the same port",
        "choose one that no other job uses",
    ),
    (
        {**on_kubernetes(pod_monitor=True), "metrics": {"enabled": False}},
        "launch.kubernetes.pod_monitor = true",
        "has nothing to scrape: metrics.enabled is false",
        "",
    ),
    (
        {**on_kubernetes(pod_monitor=True), "metrics": {"host": "127.0.0.1"}},
        "metrics.host = '127.0.0.1'",
        (
            "cannot be reached from other pods, so Prometheus would find nothing where "
            "launch.kubernetes.pod_monitor: true sends it"
        ),
        "leave it out: ranks in pods listen on all addresses, and a NetworkPolicy says who may come in",
    ),
    (
        on_kubernetes(ssh_port=9400),
        "metrics.port = 9400",
        "sshd listens on 9400, one of these ports",
        "",
    ),
    # Single fields.
    ({"train": {"epochs": "3"}}, 'train.epochs = "3"', "must be a whole number", "write it without quotes"),
    ({"train": {"epochs": "three"}}, 'train.epochs = "three"', "must be a whole number", ""),
    ({"train": {"epochs": 2.5}}, "train.epochs = 2.5", "must be a whole number", ""),
    ({"train": {"epochs": 0}}, "train.epochs = 0", "must be at least 1", ""),
    (
        {"train": {"deterministic": "true"}},
        'train.deterministic = "true"',
        "must be true or false",
        "write it without quotes",
    ),
    (
        {"train": {"precision": "fp8"}},
        'train.precision = "fp8"',
        "must be one of 'fp32', 'bf16' or 'fp16'",
        "",
    ),
    (
        {"train": {"cuda_graph": "always"}},
        'train.cuda_graph = "always"',
        "must be one of true, false or 'auto'",
        "",
    ),
    (
        {"train": {"compile": True}},
        "train.compile = true",
        "must be a section: a mapping of field names to values",
        "write {} to compile with what is set by default",
    ),
    (
        {"train": {"matmul_precision": "tf32"}},
        'train.matmul_precision = "tf32"',
        "must be one of 'highest', 'high' or 'medium'",
        "high is TF32",
    ),
    (
        {"allreduce": {"wire_dtype": "bfloat16"}},
        'allreduce.wire_dtype = "bfloat16"',
        "must be one of 'fp32', 'fp16' or 'bf16'",
        "write bf16",
    ),
    ({"launch": {"env": {"bool": 3}}}, "launch.env.bool = 3", "must be a text", ""),
    ({"lr": {"base_lr": float("inf")}}, "lr.base_lr = Infinity", "must be a finite number", ""),
    ({"train": 7}, "train = 7", "must be a section: a mapping of field names to values", ""),
    ({"launch": {"hosts": "a:1"}}, 'launch.hosts = "a:1"', "must be a list", ""),
    (
        {"launch": {"hosts": ["a:x"]}},
        'launch.hosts.0 = "a:x"',
        "is not allowed here",
        "allowed: host:slots, as in 'node01:4'",
    ),
    ({"launch": {"env": [1]}}, "launch.env = [1]", "must be a mapping of names to values", ""),
    (
        {"launch": {"ssh": {"prot": 22}}},
        "launch.ssh.prot = 22",
        "is not a known field",
        "did you mean 'port'?",
    ),
    (
        {"launch": {"ssh": {"x": 22}}},
        "launch.ssh.x = 22",
        "is not a known field",
        "known here: identity_file, options, port, user",
    ),
]


@pytest.mark.parametrize(("sections", "field", "message", "hint"), SAID)
def test_names_the_field_what_was_found_what_is_allowed_and_what_to_do(
    tmp_path, sections, field, message, hint
):
    found = problems(tmp_path, changed(**sections))

    whole = f"  {field}\n      {message}" + (f"\n      hint: {hint}" if hint else "")
    assert found[field.partition(" = ")[0]] == whole


class TestLimitsOfAFile:
    def refused(self, tmp_path, text, name="job.yaml"):
        with pytest.raises(ConfigError) as caught:
            load_job(job_file(tmp_path, text, name), environ={})
        (problem,) = caught.value.problems
        assert problem.path == "(the file)"
        return problem

    def test_one_that_is_too_large_is_no_job(self, tmp_path, monkeypatch):
        text = json.dumps(VALID)
        monkeypatch.setattr(module, "MAX_FILE_BYTES", len(text))
        assert load_job(job_file(tmp_path, text, "job.json"), environ={})

        monkeypatch.setattr(module, "MAX_FILE_BYTES", len(text) - 1)
        problem = self.refused(tmp_path, text)

        assert problem.message == f"is larger than {len(text) - 1} bytes: this is not a job description"

    def test_an_ending_that_nobody_knows_is_refused_with_those_that_are(self, tmp_path):
        problem = self.refused(tmp_path, "", "job.ini")

        assert problem.message == "has an unknown ending '.ini'"
        assert problem.hint == "use one of .yaml, .yml, .toml, .json"

    def test_a_list_is_no_job(self, tmp_path):
        problem = self.refused(tmp_path, "[1]")

        assert problem.message == "must be a mapping of field names to values"
        assert problem.hint == "start with 'name: my-job'"

    def test_a_mistake_of_yaml_has_its_line(self, tmp_path):
        message = self.refused(tmp_path, "name: job\ntask: a: b\n").message

        assert message == "is not valid YAML: mapping values are not allowed here (line 2)"

    @pytest.mark.parametrize(("depth", "is_refused"), [(32, False), (33, True)])
    def test_nesting_has_an_end(self, tmp_path, depth, is_refused):
        # The tree and task_args are two levels.
        nested = 1
        for _ in range(depth - 2):
            nested = [nested]
        document = json.dumps({**VALID, "task_args": {"x": nested}})
        if is_refused:
            assert self.refused(tmp_path, document, "job.json").message == (
                "is nested too deeply, or has too many values"
            )
        else:
            load_job(job_file(tmp_path, document, "job.json"), environ={})

    def test_what_unfolds_to_too_much_is_counted_with_all_that_is_shared(self, tmp_path, monkeypatch):
        # The tree, task_args, three lists of three numbers each, and the values of a valid job.
        text = "name: job\ntask: digits\ntask_args:\n  a: &x [1, 2, 3]\n  b: *x\n  c: *x\n"
        monkeypatch.setattr(module, "MAX_VALUES", 1 + 2 + 1 + 3 * 4)
        assert load_job(job_file(tmp_path, text), environ={})

        monkeypatch.setattr(module, "MAX_VALUES", 1 + 2 + 1 + 3 * 4 - 1)
        self.refused(tmp_path, text)


class TestOverrides:
    def test_of_something_that_is_no_section_is_refused(self, tmp_path):
        found = problems(tmp_path, VALID, ["name.first=a"])

        assert found["name.first"] == "  name.first = \"a\"\n      --set: 'name' is not a section"

    def test_that_is_nested_too_deeply_is_refused(self, tmp_path):
        found = problems(tmp_path, VALID, [f"task_args.x={'[' * 40}{']' * 40}"])

        assert found["task_args.x"].endswith("--set: is nested too deeply")

    def test_that_is_no_yaml_is_refused(self, tmp_path):
        found = problems(tmp_path, VALID, ["task_args.x={"])

        assert "--set: is not a YAML value: expected the node content" in found["task_args.x"]

    @pytest.mark.parametrize("override", ["train.epochs", "=3", "train..epochs=3", ".epochs=3"])
    def test_of_another_form_are_refused(self, tmp_path, override):
        found = problems(tmp_path, VALID, [override])

        assert found["--set"].endswith(
            "is not of the form field=value\n      hint: write --set train.epochs=3"
        )

    def test_one_wrong_one_hides_no_other(self, tmp_path):
        assert problems(tmp_path, VALID, ["broken", "train.epochs=0"]).keys() == {"--set", "train.epochs"}

    def test_make_the_sections_that_are_not_there(self, tmp_path):
        job = load_job(job_file(tmp_path, VALID), ["checkpoint.best={metric: loss, mode: min}"], environ={})

        assert job.checkpoint.best.metric == "loss"


class TestValues:
    def test_that_have_no_json_are_named_by_their_kind(self):
        endless = []
        endless.append(endless)

        assert shorten(endless) == "<list>"
        assert shorten({1: object}) == '{"1": "<class \'object\'>"}'

    @pytest.mark.parametrize(
        ("kind", "value", "expected"),
        [
            ("int_type", "3", True),
            ("float_type", "3e-4", True),
            ("bool_type", "True", True),
            ("bool_type", "false", True),
            ("bool_type", "yes", False),
            ("int_type", "three", False),
            ("int_type", 3, False),
            ("string_type", "3", False),
        ],
    )
    def test_that_would_do_without_quotes_are_known(self, kind, value, expected):
        assert _is_quoted_number(kind, value) == expected

    def test_of_a_section_are_its_fields(self):
        assert set(_fields_at(Job, ())) == set(Job.model_fields)
        assert "port" in _fields_at(Job, ("launch", "ssh"))
        assert "metric" in _fields_at(Job, ("checkpoint", "best"))
        assert _fields_at(Job, ("nonsense",)) == []
        assert _fields_at(Job, ("name", "first")) == []

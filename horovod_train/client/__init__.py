"""Python client: start jobs, and observe and end them, on this machine or through a server.

    import horovod_train as ht

    job = ht.submit("spiral.yaml", {"train.epochs": 30, "launch.num_ranks": 4})
    job.wait()
    print(job.result().metrics)

All launchers are supported: jobs on this machine, on other hosts, in Slurm and on Kubernetes. ``ht.Client``
uses the HTTP API of ``horovod-train serve`` instead. A job does not depend on the process that submitted it.
Methods block; in an event loop, call them in a thread: ``await asyncio.to_thread(job.wait)``.
"""

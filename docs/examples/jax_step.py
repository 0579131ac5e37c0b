"""A JAX train step with optax on any number of ranks.  usage: jax_step.py [BATCH_SIZE_PER_RANK]."""

import sys

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from horovod_train.frameworks.reader import Shards
from horovod_train.plugins.jax import average_over_ranks, broadcast, init

ranks, batch_size = init(), int(sys.argv[1]) if len(sys.argv) > 1 else 32
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
key = jax.random.key(ranks.rank)
params = {"w1": jax.random.normal(key, (64, 64)) / 8, "w2": jax.random.normal(key, (64, 10)) / 8}
optimizer = optax.chain(average_over_ranks(ranks), optax.adam(1e-4 * batch_size * ranks.size))


def loss(params, inputs, labels, weight):
    logits = jax.nn.relu(inputs @ params["w1"]) @ params["w2"]
    return weight * optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def step(params, state, inputs, labels, weight):
    updates, state = optimizer.update(jax.grad(loss)(params, inputs, labels, weight), state, params)
    return optax.apply_updates(params, updates), state


params = broadcast(ranks, params)
state = optimizer.init(params)
shards = Shards(ranks, x[:1500], y[:1500], batch_size=batch_size)
for epoch in range(5):
    for weight, batch in shards.epoch(epoch):
        params, state = step(params, state, *batch, weight)
accuracy = float(((jax.nn.relu(x[1500:] @ params["w1"]) @ params["w2"]).argmax(1) == y[1500:]).mean())
print(f"rank {ranks.rank} of {ranks.size}: accuracy {accuracy:.3f}", flush=True)
print(f"weights {sum(float(jnp.abs(w).sum()) for w in params.values()):.4f}", flush=True)

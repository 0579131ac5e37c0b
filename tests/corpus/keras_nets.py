"""Small models of Keras, for each of its back ends and for loops of TensorFlow: each takes x and t.

x has shape [batch, 6], t has five numbers of tokens; the model returns logits, shape [batch, 4].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, ops

NETS: dict[str, Callable[[Any, Any], Any]] = {}


def net(build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Add a function that returns logits of the two inputs."""
    NETS[build.__name__] = build
    return build


def image(x: Any) -> Any:
    return layers.Reshape((2, 3, 1))(x)


@net
def dense(x, t):
    return layers.Dense(4)(layers.Dense(8, activation="tanh")(x))


@net
def residual(x, t):
    h = layers.Dense(8)(x)
    for _ in range(3):
        h = layers.Add()([h, layers.Dense(8, activation="gelu")(h)])
    return layers.Dense(4)(h)


@net
def layer_norm(x, t):
    return layers.Dense(4)(layers.LayerNormalization()(layers.Dense(8)(x)))


@net
def group_norm(x, t):
    return layers.Dense(4)(layers.GroupNormalization(2)(layers.Dense(8)(x)))


@net
def rms_norm(x, t):
    return layers.Dense(4)(layers.RMSNormalization()(layers.Dense(8)(x)))


@net
def unit_norm(x, t):
    return layers.Dense(4)(layers.UnitNormalization()(layers.Dense(8)(x)))


@net
def regularized(x, t):
    h = layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1", activation="relu")(x)
    return layers.Dense(4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01))(h)


@net
def constrained(x, t):
    h = layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.7), activation="relu")(x)
    return layers.Dense(4, kernel_constraint="non_neg")(h)


@net
def frozen(x, t):
    return layers.Dense(4)(layers.Dense(8, activation="tanh", trainable=False)(x))


@net
def lora(x, t):
    dense = layers.Dense(8, activation="tanh")
    h = dense(x)
    dense.enable_lora(2)
    return layers.Dense(4)(h)


@net
def shared(x, t):
    block = layers.Dense(6, activation="tanh")
    return layers.Dense(4)(block(block(block(x))))


@net
def conv2d(x, t):
    h = layers.Conv2D(4, 2, padding="same", activation="relu")(image(x))
    return layers.Dense(4)(layers.Flatten()(h))


@net
def separable(x, t):
    h = layers.SeparableConv2D(4, 2, padding="same")(image(x))
    return layers.Dense(4)(layers.GlobalAveragePooling2D()(h))


@net
def depthwise(x, t):
    h = layers.DepthwiseConv2D(2, padding="same", depth_multiplier=3)(image(x))
    return layers.Dense(4)(layers.GlobalMaxPooling2D()(h))


@net
def transposed(x, t):
    h = layers.Conv2DTranspose(3, 2, strides=2, activation="relu")(image(x))
    return layers.Dense(4)(layers.Flatten()(layers.AveragePooling2D()(h)))


@net
def conv1d(x, t):
    h = layers.Conv1D(6, 3, padding="causal", dilation_rate=2)(layers.Embedding(20, 6)(t))
    return layers.Dense(4)(layers.GlobalMaxPooling1D()(h))


@net
def gru(x, t):
    return layers.Dense(4)(layers.GRU(6)(layers.Embedding(20, 6)(t)))


@net
def lstm(x, t):
    return layers.Dense(4)(layers.LSTM(6)(layers.LSTM(6, return_sequences=True)(layers.Embedding(20, 6)(t))))


@net
def bidirectional(x, t):
    return layers.Dense(4)(layers.Bidirectional(layers.SimpleRNN(5))(layers.Embedding(20, 6)(t)))


@net
def masked(x, t):
    return layers.Dense(4)(layers.GRU(6)(layers.Embedding(20, 6, mask_zero=True)(t)))


@net
def time_distributed(x, t):
    h = layers.TimeDistributed(layers.Dense(5, activation="relu"))(layers.Embedding(20, 6)(t))
    return layers.Dense(4)(layers.Flatten()(h))


@net
def attention(x, t):
    h = layers.Embedding(20, 8)(t)
    return layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(2, 4)(h, h)))


@net
def causal(x, t):
    h = layers.Embedding(20, 8)(t)
    for _ in range(2):
        h = layers.Add()([h, layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)])
        h = layers.LayerNormalization()(h)
    return layers.Dense(4)(h[:, -1])


@net
def additive(x, t):
    h = layers.Embedding(20, 8)(t)
    return layers.Dense(4)(layers.Flatten()(layers.AdditiveAttention()([h, h])))


@net
def grouped(x, t):
    h = layers.Embedding(20, 8)(t)
    return layers.Dense(4)(layers.Flatten()(layers.GroupedQueryAttention(4, 4, 2)(h, h)))


@net
def two_inputs(x, t):
    return layers.Dense(4)(layers.Concatenate()([x, layers.Flatten()(layers.Embedding(20, 3)(t))]))


@net
def einsum(x, t):
    h = layers.EinsumDense("btd,de->bte", output_shape=(None, 5), bias_axes="e")(layers.Embedding(20, 6)(t))
    return layers.Dense(4)(layers.Flatten()(h))


@net
def prelu(x, t):
    return layers.Dense(4)(layers.PReLU()(layers.Dense(8)(x)))


class Scaled(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        return x * self.scale + self.shift


@net
def own_layer(x, t):
    return layers.Dense(4)(Scaled()(layers.Dense(8, activation="tanh")(Scaled()(x))))


class Tied(layers.Layer):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(20, 4)
        self.out = layers.Dense(4)

    def call(self, t):
        h = ops.mean(self.embedding(t), axis=1)
        return self.out(ops.matmul(h, ops.transpose(self.embedding.embeddings)))


@net
def tied(x, t):
    return Tied()(t)


class Experts(layers.Layer):
    def __init__(self):
        super().__init__()
        self.gate = layers.Dense(3, activation="softmax")
        self.experts = [layers.Dense(4) for _ in range(3)]

    def call(self, x):
        found = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.einsum("be,beo->bo", self.gate(x), found)


@net
def experts(x, t):
    return Experts()(x)


class Recomputed(layers.Layer):
    def __init__(self):
        super().__init__()
        self.block = layers.Dense(6, activation="tanh")

    def call(self, x):
        for _ in range(4):
            x = x + 0.3 * self.block(x)
        return x


@net
def iterated(x, t):
    return layers.Dense(4)(Recomputed()(x))


@net
def spectral(x, t):
    return layers.Dense(4)(layers.SpectralNormalization(layers.Dense(8))(x))


def made(name: str) -> keras.Model:
    """Return a model with the same weights each time."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1234)
    x, t = keras.Input((6,)), keras.Input((5,), dtype="int64")
    return keras.Model([x, t], NETS[name](x, t))

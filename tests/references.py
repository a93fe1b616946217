"""Naive float64 references, one a definition, written from the papers and used only by tests.

Everything is dense numpy and einsum over arrays `[*batch, length, heads, head_dim]`. The functions are analytic in
their float arguments and keep complex128, so a test differentiates them by a complex step: no second implementation.
"""

import functools
import itertools
import math
import types

import numpy as np


def wide(x):
    """`x` in float64, or complex128 where it is complex already."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def derivative(function, point, direction, step=1e-30):
    """Derivative of an analytic function along `direction`, exact to rounding (Squire and Trapp 1998, complex step)."""
    return np.imag(function(wide(point) + 1j * step * wide(direction))) / step


def attend(
    query,
    key,
    value,
    *,
    visible=True,
    mask=None,
    bias=None,
    segment_ids=None,
    scale=None,
    softcap=None,
    sinks=None,
    relative_keys=None,
    relative_values=None,
    added=None,
    with_lse=False,
):
    """softmax(scale * (q k + q a^K) + added + bias) (v + a^V) over the visible pairs; zero where nothing is visible.

    With a softcap c the scaled product s is c tanh(s / c) (Gemma 2, section 2). A head's sink is one more logit in the
    softmax, without a value. `with_lse` also returns the log-sum-exp `[*batch, q_len, heads]`, the sink included.

    Vaswani et al. 2017, eq. 1, with the relative vectors of Shaw et al. 2018, eq. 3-4. `visible` is broadcastable to
    `[*batch, heads, q_len, kv_len]`, relative vectors are `[heads or 1, q_len, kv_len, head_dim]`, `added` is
    `[heads or 1, q_len, kv_len]`. Query head h reads key and value head `h // (num_heads // num_kv_heads)`.
    """
    query, key, value = wide(query), wide(key), wide(value)
    heads, head_dim = query.shape[-2:]
    key, value = (np.repeat(x, heads // x.shape[-2], axis=-2) for x in (key, value))
    scores = np.einsum("...qhd,...khd->...hqk", query, key)
    if relative_keys is not None:
        per_head = np.broadcast_to(relative_keys, (heads, *relative_keys.shape[1:]))
        scores = scores + np.einsum("...qhd,hqkd->...hqk", query, per_head)
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else wide(scale)[..., None, None])
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + (0 if added is None else added) + (0 if bias is None else wide(bias))
    seen = np.broadcast_to(visible, scores.shape)
    if mask is not None:
        seen = seen & np.broadcast_to(np.asarray(mask) > 0, scores.shape)
    if segment_ids is not None:
        q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen = seen & (np.asarray(q_ids)[..., None, :, None] == np.asarray(k_ids)[..., None, None, :])
    top = np.max(np.where(seen, scores.real, -np.inf), axis=-1, keepdims=True)
    if sinks is not None:
        sinks = wide(sinks)[:, None, None]
        top = np.maximum(top, sinks.real)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.where(seen, np.exp(np.where(seen, scores, top) - top), 0)
    total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks - top))
    weights = weights / np.where(total == 0, 1, total)
    out = np.einsum("...hqk,...khd->...qhd", weights, value)
    if relative_values is not None:
        per_head = np.broadcast_to(relative_values, (heads, *relative_values.shape[1:]))
        out = out + np.einsum("...hqk,hqkd->...qhd", weights, per_head)
    if with_lse:
        lse = np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1, total)))
        return out, np.swapaxes(lse[..., 0], -1, -2)
    return out


# ---- patterns: bool [1, q_len, kv_len] from the positions of both sides


def full_pattern(q_positions, k_positions, causal=False):
    """All pairs, or those whose key is not in the future."""
    distance = k_positions[None, :] - q_positions[:, None]
    return ((distance <= 0) if causal else np.ones(distance.shape, bool))[None]


def window_pattern(q_positions, k_positions, left, right, causal=False):
    """`left` tokens before and `right` after, inclusive, and the token itself."""
    distance = k_positions[None, :] - q_positions[:, None]
    near = (distance >= -left) & (distance <= right)
    return (near & (distance <= 0) if causal else near)[None]


# ---- position terms


def shaw_indices(q_positions, k_positions, max_distance):
    """Row of w^K or w^V that holds a_ij: clip(j - i, k) + k (Shaw et al. 2018, section 3.2)."""
    indices = np.zeros((len(q_positions), len(k_positions)), int)
    for row, i in enumerate(q_positions):
        for column, j in enumerate(k_positions):
            indices[row, column] = max(-max_distance, min(max_distance, j - i)) + max_distance
    return indices


@functools.cache
def t5_bucket(distance, num_buckets, max_distance, bidirectional):
    """Bucket of `distance = key position - query position` in exact integer arithmetic (Raffel et al. 2020, 2.1).

    Half of the buckets hold one distance each; the other half grow logarithmically up to `max_distance`, and the last
    holds everything beyond. Bidirectional: keys after the query use the upper half of the table. Otherwise they
    count as distance 0.
    """
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = num_buckets // 2
    if far < exact:
        return bucket + far
    steps = num_buckets - exact  # far / exact >= (max_distance / exact) ** (step / steps), without floats:
    step = 0
    while step < steps - 1 and far**steps * exact ** (step + 1) >= max_distance ** (step + 1) * exact**steps:
        step += 1
    return bucket + exact + step


def alibi_slopes(num_heads):
    """Slopes of Press et al. 2022: 2^(-8 i / n), and for other head counts every second one of the next power."""

    def geometric(n):
        return [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]

    below = 1
    while below * 2 <= num_heads:
        below *= 2
    return np.array(geometric(below) + geometric(2 * below)[0::2][: num_heads - below])


def rotate(x, positions, base):
    """Rotary embedding of `x [*batch, length, heads, head_dim]` (Su et al. 2021, eq. 34), pair by pair.

    Pair m is dimensions (m, m + head_dim / 2), the halves convention; it turns by `position * base^(-2 m / head_dim)`.
    """
    x = wide(x)
    out = np.array(x)
    half = x.shape[-1] // 2
    for m in range(half):
        first, second = m, m + half
        angle = (np.asarray(positions, np.float64) * float(base) ** (-2 * m / (2 * half)))[:, None]
        out[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
        out[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
    return out


def shaw(position, params, q_positions, k_positions, num_heads, causal):
    """a^K and a^V by gathering rows of the tables (Shaw et al. 2018, eq. 3-5); heads share them."""
    indices = shaw_indices(q_positions, k_positions, position.max_distance)
    gathered = {"relative_keys": wide(params["key"])[indices][None]}
    return gathered | ({"relative_values": wide(params["value"])[indices][None]} if position.values else {})


def music_relative(position, params, q_positions, k_positions, num_heads, causal):
    """S^rel by gathering every distance in each head's table (Huang et al. 2018, eq. 3, without skewing)."""
    rows = k_positions[None, :] - q_positions[:, None] + position.max_len - 1
    return {"relative_keys": np.stack([wide(params["key"])[head][rows] for head in range(num_heads)])}


def t5_bias(position, params, q_positions, k_positions, num_heads, causal):
    """The scalar of each head and bucket, added to the scaled score."""
    bucket = lambda distance: t5_bucket(int(distance), position.num_buckets, position.max_distance, not causal)
    buckets = np.array([[bucket(j - i) for j in k_positions] for i in q_positions])
    return {"added": wide(params["bias"])[:, buckets]}


def alibi(position, params, q_positions, k_positions, num_heads, causal):
    """-slope * |distance|, added to the scaled score."""
    distance = np.abs(k_positions[None, :] - q_positions[:, None])
    return {"added": -alibi_slopes(num_heads)[:, None, None] * distance}


def shaw_2d(position, params, q_positions, k_positions, num_heads, causal):
    """a^K and a^V by gathering, for each pair, the vectors of its distance in rows and in columns.

    Bello et al. 2019, equation 3, with Shaw's clipping. Prefix tokens have vectors by who is one.
    """

    far, before = position.max_distance, position.num_prefix_tokens
    pairs = {}
    for i, query in enumerate(q_positions):
        for j, key in enumerate(k_positions):
            outside = bool(query < before), bool(key < before)
            if any(outside):
                pairs[i, j] = ("prefix_{}", {(True, False): 0, (False, True): 1, (True, True): 2}[outside]), None
                continue
            steps = np.subtract(
                divmod(int(key) - before, position.columns), divmod(int(query) - before, position.columns)
            )
            row, column = (min(max(int(step), -far), far) + far for step in steps)
            pairs[i, j] = ("row_{}", row), ("column_{}", column)

    def vectors(kind):
        tables = {name: wide(table) for name, table in params.items() if name.endswith(kind)}
        dtype = np.result_type(*tables.values())
        found = np.zeros((len(q_positions), len(k_positions), next(iter(tables.values())).shape[-1]), dtype)
        for pair, entries in pairs.items():
            for name, index in filter(None, entries):
                found[pair] += tables[name.format(kind)][index]
        return found[None]

    return {f"relative_{kind}s": vectors(kind) for kind in (("key", "value") if position.values else ("key",))}


TERMS = {"Shaw2D": shaw_2d, "Shaw": shaw, "MusicRelative": music_relative, "T5Bias": t5_bias, "ALiBi": alibi}


# ---- variants


def _paired(visible, op, params, query, key, value, offset, **options):
    """Attention over the pairs of `visible`, with the op's position term; the first query stands at `offset`."""
    q_positions, k_positions = offset + np.arange(query.shape[-3]), np.arange(key.shape[-3])
    kind = type(op.position).__name__
    if kind == "Rotary":
        query, key = rotate(query, q_positions, op.position.base), rotate(key, k_positions, op.position.base)
    elif op.position is not None:
        own = params.get("position", {})
        options |= TERMS[kind](op.position, own, q_positions, k_positions, query.shape[-2], op.causal)
    return attend(query, key, value, visible=visible(q_positions, k_positions), **options)


def full(op, params, query, key, value, *, offset=0, **options):
    """Vaswani et al. 2017, section 3.2.1."""
    visible = lambda q, k: full_pattern(q, k, op.causal)
    return _paired(visible, op, params, query, key, value, offset, **options)


def window(op, params, query, key, value, *, offset=0, **options):
    """`left` and `right` tokens around each one."""
    visible = lambda q, k: window_pattern(q, k, op.left, op.right, op.causal)
    return _paired(visible, op, params, query, key, value, offset, **options)


def _by_pair(exists, causal):
    """bool `[heads, q_len, kv_len]` of `exists(head, i, j)`, pair by pair; causal: without j > i."""

    def visible(q_positions, k_positions, num_heads):
        out = np.zeros((num_heads, len(q_positions), len(k_positions)), bool)
        for head in range(num_heads):
            for row, i in enumerate(q_positions):
                for column, j in enumerate(k_positions):
                    out[head, row, column] = exists(head, int(i), int(j)) and (j <= i or not causal)
        return out

    return visible


def local(op, params, query, key, value, *, offset=0, **options):
    """The tokens of one's own block (Tay et al. 2021, section 3.3)."""
    visible = _by_pair(lambda head, i, j: i // op.block_size == j // op.block_size, op.causal)
    return _paired(lambda q, k: visible(q, k, 1), op, params, query, key, value, offset, **options)


def longformer(op, params, query, key, value, *, offset=0, global_tokens=None, **options):
    """Keys d apart, half of the window on each side, and global tokens everywhere (Beltagy et al. 2020, section 3.1).

    These are the first, or those of each example, bool `[batch, length]`.
    """
    first = np.arange(key.shape[-3])[None] < op.num_global_tokens
    by_example = first if global_tokens is None else np.asarray(global_tokens)
    heads = query.shape[-2] if isinstance(op.dilation, tuple) else 1

    def visible(q_positions, k_positions):
        def exists(head, i, j, held):
            dilation = op.dilation[head] if isinstance(op.dilation, tuple) else op.dilation
            in_window = any(j == i + step * dilation for step in range(-(op.window // 2), op.window // 2 + 1))
            return in_window or held[i] or held[j]

        each = [_by_pair(lambda *pair, held=held: exists(*pair, held), op.causal) for held in by_example]
        return np.stack([one(q_positions, k_positions, heads) for one in each])

    return _paired(visible, op, params, query, key, value, offset, **options)


def sparse(op, params, query, key, value, *, offset=0, **options):
    """The two patterns of Child et al. 2019, sections 4.2 and 4.3, in every head or in turn."""

    def patterns(i, j):
        if op.kind == "strided":
            return abs(i - j) <= op.stride, (i - j) % op.stride == 0
        return i // op.stride == j // op.stride, j % op.stride in range(op.stride - op.summary, op.stride)

    def exists(head, i, j):
        return any(patterns(i, j)) if op.heads == "merged" else patterns(i, j)[head % 2]

    visible, heads = _by_pair(exists, op.causal), query.shape[-2] if op.heads == "split" else 1
    return _paired(lambda q, k: visible(q, k, heads), op, params, query, key, value, offset, **options)


def by_pattern(op, params, query, key, value, *, offset=0, **options):
    """Dense attention under the op's own pattern, which test_attention_patterns checks against its definition."""
    length = key.shape[-3]
    visible = lambda q, k: op.pattern(length, length, query.shape[-2])[:, q]
    return _paired(visible, op, params, query, key, value, offset, **options)


def bigbird_blocks(num_blocks, num_window_blocks, num_global_blocks, causal):
    """Which blocks every row sees, and which ones it may draw; bool `[blocks, blocks]` each (Zaheer et al. 2020, 2).

    The first ceil(g / 2) and last floor(g / 2) blocks are global rows and columns; the window is centred. Causal: all
    of it cut at the diagonal, the drawn ones come from the past, and no last blocks are global.
    """
    always, candidates = (np.zeros((num_blocks, num_blocks), bool) for _ in range(2))
    first = -(-num_global_blocks // 2)
    last = num_blocks if causal else num_blocks - num_global_blocks // 2
    for row in range(num_blocks):
        for column in range(num_blocks):
            near = abs(row - column) <= num_window_blocks // 2
            everywhere = any(block < first or block >= last for block in (row, column))
            past = column <= row or not causal
            always[row, column] = (near or everywhere) and past
            candidates[row, column] = not (near or everywhere) and past
    return always, candidates


def linformer(op, params, query, key, value, *, mask=None, scale=None, offset=0, **nothing):
    """softmax(scale * q (E k)) (F v) with zeroed padding, slot by slot (Wang et al. 2020, eq. 7)."""
    assert all(x is None for x in nothing.values())
    query, key, value = wide(query), wide(key), wide(value)
    heads, (*batch, length, kv_heads, _) = query.shape[-2], key.shape
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, length))
    real = np.swapaxes(real, -3, -1)[..., 0, :]  # [*batch, length, heads]
    width = -(-op.max_len // op.rank)
    attended = np.zeros((*batch, op.rank, heads), bool)
    for slot in range(op.rank):
        reach = slice(None) if op.projection == "learned" else slice(slot * width, (slot + 1) * width)
        attended[..., slot, :] = real[..., reach, :].any(axis=-2)

    def project(x, name):
        x = np.where(real[..., None], np.repeat(x, heads // kv_heads, axis=-2), 0)
        slots = np.zeros((*batch, op.rank, heads, x.shape[-1]), x.dtype if op.projection == "mean" else complex)
        weights = None if op.projection == "mean" else wide(params.get(name, params.get("shared")))
        for slot in range(op.rank):
            places = range(slot * width, min((slot + 1) * width, length))
            for head in range(heads):
                own = 0 if op.sharing != "none" else head // (heads // kv_heads)
                out = slots[..., slot, head, :]
                if op.projection == "learned":
                    out += np.einsum("l,...ld->...d", weights[own, slot, :length], x[..., head, :])
                elif op.projection == "conv":
                    for tap, place in enumerate(places):
                        out += x[..., place, head, :] @ weights[own, tap]
                elif len(places):
                    window = slice(places.start, places.stop)
                    tokens = np.maximum(real[..., window, head].sum(axis=-1), 1)
                    out += x[..., window, head, :].sum(axis=-2) / tokens[..., None]
        return slots if np.iscomplexobj(x) or np.iscomplexobj(weights) else slots.real

    visible = np.swapaxes(attended, -1, -2)[..., None, :]
    return attend(query, project(key, "key"), project(value, "value"), visible=visible, scale=scale)


# ---- variants by features: no softmax


def _by_features(op, query_features, key_features, value, *, offset, mask, segment_ids, decays=None, normalized=True):
    """sum_j w_ij v_j, with w_ij = decay^|i - j| f(q_i) f(k_j) over the visible pairs, divided by sum_j w_ij if asked.

    Features are `[*batch, length, heads, features]`, with the heads of queries.
    """
    weights = np.einsum("...qhf,...khf->...hqk", query_features, key_features)
    q_len, kv_len = weights.shape[-2:]
    distance = offset + np.arange(q_len)[:, None] - np.arange(kv_len)
    seen = np.broadcast_to((distance >= 0) if op.causal else True, weights.shape)
    if mask is not None:
        seen = seen & np.broadcast_to(np.asarray(mask) > 0, weights.shape)
    if segment_ids is not None:
        q_ids, k_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen = seen & (np.asarray(q_ids)[..., None, :, None] == np.asarray(k_ids)[..., None, None, :])
    if decays is not None:
        weights = weights * np.asarray(decays)[:, None, None] ** np.abs(distance)
    weights = np.where(seen, weights, 0)
    if normalized:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


def _featured(op, query, key, value, offset):
    """Queries, keys and values in float64, keys and values repeated for each query head, turned by Rotary."""
    query, key, value = wide(query), wide(key), wide(value)
    if op.position is not None:
        query = rotate(query, offset + np.arange(query.shape[-3]), op.position.base)
        key = rotate(key, np.arange(key.shape[-3]), op.position.base)
    groups = query.shape[-2] // key.shape[-2]
    return query, np.repeat(key, groups, axis=-2), np.repeat(value, groups, axis=-2)


def linear(op, params, query, key, value, *, offset=0, mask=None, segment_ids=None, scale=None, **nothing):
    """elu(q) + 1 and elu(k) + 1 (Katharopoulos et al. 2020, eq. 4 and 7); a scale of all weights cancels."""
    assert all(x is None for x in nothing.values())
    query, key, value = _featured(op, query, key, value, offset)
    features = lambda x: np.where(x.real > 0, x + 1, np.exp(np.where(x.real > 0, 0, x)))
    options = {"offset": offset, "mask": mask, "segment_ids": segment_ids}
    return _by_features(op, features(query), features(key), value, **options)


def performer(op, params, query, key, value, *, offset=0, mask=None, segment_ids=None, scale=None, **nothing):
    """exp(w x - |x|^2 / 2) or relu(w x), x the vector times the root of the scale (Choromanski et al. 2021, lemma 1).

    What is largest of a feature among the keys, and of a query, is divided out: it cancels.
    """
    assert all(x is None for x in nothing.values())
    query, key, value = _featured(op, query, key, value, offset)
    options = {"offset": offset, "mask": mask, "segment_ids": segment_ids}
    directions = params.get("constants") or drawn(op, query.shape[-1])
    directions = wide(directions["projection"])
    if op.kernel == "relu":
        features = lambda x: np.where((y := x @ directions.T).real > 0, y, 0)
        return _by_features(op, features(query), features(key), value, **options)
    root = np.sqrt(query.shape[-1] ** -0.5 if scale is None else wide(scale))
    query, key = (x * np.broadcast_to(root, x.shape[-2])[:, None] for x in (query, key))
    of_query, of_key = (x @ directions.T - (x * x).sum(-1, keepdims=True) / 2 for x in (query, key))
    top = of_key.real.max(axis=(-3), keepdims=True)  # cancels: added to the one, taken from the other
    of_query = of_query + top
    of_query = of_query - of_query.real.max(axis=-1, keepdims=True)
    return _by_features(op, np.exp(of_query), np.exp(of_key - top), value, **options)


@functools.cache
def drawn(op, head_dim, num_heads=1):
    """What the op draws from its seed."""
    import jax

    return op.constants(jax.random.key(op.seed), types.SimpleNamespace(head_dim=head_dim, num_heads=num_heads))


def retention(op, params, query, key, value, *, offset=0, mask=None, segment_ids=None, scale=None, **nothing):
    """(scale q k * decay^|i - j|) v with the decays 1 - 2^(-5 - head) (Sun et al. 2023, eq. 5 and 8)."""
    assert all(x is None for x in nothing.values())
    query, key, value = _featured(op, query, key, value, offset)
    heads, head_dim = query.shape[-2:]
    decays = [1 - 2.0 ** -(5 + head) for head in range(heads)] if op.decays is None else op.decays
    scale = wide(head_dim**-0.5 if scale is None else scale)
    query = query * np.broadcast_to(scale, heads)[:, None]
    options = {"offset": offset, "mask": mask, "segment_ids": segment_ids}
    return _by_features(op, query, key, value, decays=decays, normalized=False, **options)


def nystrom(op, params, query, key, value, *, mask=None, scale=None, offset=0, **nothing):
    """softmax(q K~^T) Z softmax(Q~ k^T) v over the real tokens of one example and head at a time (Xiong et al. 2021).

    Landmarks are means of segments; Z comes from the iteration of algorithm 1 there, on the segments that exist.
    """
    assert offset == 0 and all(x is None for x in nothing.values())
    query, key, value = wide(query), wide(key), wide(value)
    (*batch, length, heads, head_dim), group = query.shape, query.shape[-2] // key.shape[-2]
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, length))[..., 0, :]
    scales = np.broadcast_to(1 / math.sqrt(head_dim) if scale is None else wide(scale), heads)
    taps = wide(params["conv"]) if op.conv_size else np.zeros((key.shape[-2], 1))
    out = np.zeros((*batch, length, heads, value.shape[-1]), np.result_type(query, key, value, scales, taps))
    for at in np.ndindex(*batch, heads):
        example, head = at[:-1], at[-1]
        tokens = np.flatnonzero(real[at])
        if not len(tokens):
            continue
        q, k, v = (x[example][:, head // (group if x is not query else 1)] for x in (query, key, value))
        number = np.arange(len(tokens)) * op.num_landmarks // len(tokens)
        segments = [tokens[number == index] for index in np.unique(number)]
        q_marks, k_marks = (np.stack([x[segment].mean(0) for segment in segments]) for x in (q, k))
        of_marks, of_queries, of_tokens = (
            _softmax(scales[head] * left @ right.T)
            for left, right in ((q_marks, k_marks), (q, k_marks), (q_marks, k[tokens]))
        )
        sums = of_marks.sum(0)
        inverse, one = of_marks.T / sums[np.argmax(sums.real)], np.eye(len(segments))
        for _ in range(op.num_iterations):
            product = of_marks @ inverse
            inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
        out[example][:, head] = of_queries @ inverse @ of_tokens @ v[tokens]
        own, middle = taps[head // group], len(taps[0]) // 2
        for place, token in itertools.product(range(length), tokens):
            if abs(token - place) <= middle:
                out[example][place, head] += own[token - place + middle] * v[token]
    return out


def _softmax(scores):
    """Over the last axis; complex scores too."""
    weights = np.exp(scores - scores.real.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def compressed(op, params, query, key, value, *, mask=None, scale=None, offset=0, **nothing):
    """Attention over a convolution of keys and values, kernel = stride (Liu et al. 2018, 4.2.4), zeros for padding.

    A slot counts if it has a real token and, causal, if its last token is at or before the query.
    """
    assert all(x is None for x in nothing.values())
    (*batch, length, kv_heads, _), heads = key.shape, query.shape[-2]
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, length))[..., 0, :]
    num_slots = -(-length // op.stride)
    q_positions, ends = offset + np.arange(query.shape[-3]), (np.arange(num_slots) + 1) * op.stride - 1
    seen = np.stack([real[..., slot * op.stride : (slot + 1) * op.stride].any(-1) for slot in range(num_slots)], -1)
    visible = seen[..., None, :] & (ends <= q_positions[:, None] if op.causal else True)

    def convolve(x, kernel):
        kernel, x = wide(kernel), np.repeat(wide(x), heads // kv_heads, axis=-2)
        x = np.where(np.moveaxis(real, -1, -2)[..., None], x, 0)
        out = np.zeros((*batch, num_slots, heads, x.shape[-1]), np.result_type(x, kernel))
        for place, head in itertools.product(range(length), range(heads)):
            taps = kernel[head // (heads // kv_heads), place % op.stride]
            out[..., place // op.stride, head, :] += x[..., place, head, :] @ taps
        return out

    key, value = convolve(key, params["key"]), convolve(value, params["value"])
    return attend(query, key, value, visible=visible, scale=scale)


def topk_blocks(op, params, query, key, value, *, offset=0, mask=None, **options):
    """Attention to the own block and those of the largest gates q . mean(k), query by query (Lu et al. 2025, 2.2)."""
    (*batch, q_len, heads, _), (kv_len, kv_heads), size = query.shape, key.shape[-3:-1], op.block_size
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, kv_len))[..., 0, :]
    q_positions, k_blocks = offset + np.arange(q_len), np.arange(kv_len) // size
    visible = np.zeros((*batch, heads, q_len, kv_len), bool)
    for *at, head in np.ndindex(*batch, heads):
        at = tuple(at)
        q, k = wide(query)[at][:, head].real, wide(key)[at][:, head // (heads // kv_heads)].real
        means = {}
        for block in range(-(-kv_len // size)):
            tokens = np.flatnonzero((k_blocks == block) & real[at][head])
            if len(tokens):
                means[block] = k[tokens].mean(0)
        for i, own in enumerate(q_positions // size):
            mates = [j for j in np.flatnonzero(q_positions // size == own) if real[at][head, q_positions[j]]]
            gate = q[i] if op.gate == "query" else q[mates].mean(0) if mates else np.zeros_like(q[i])
            others = [block for block in means if (block < own if op.causal else block != own)]
            others.sort(key=lambda block: (-(gate @ means[block]), block))
            seen = np.isin(k_blocks, [own, *others[: op.num_blocks - 1]])
            visible[at][head, i] = seen & (np.arange(kv_len) <= q_positions[i]) if op.causal else seen
    return _paired(lambda q, k: visible, op, params, query, key, value, offset, mask=mask, **options)


def synthesizer(op, params, query, key, value, *, offset=0, scale=None, **options):
    """softmax(scores) v, with the scores of Tay et al. 2021, section 3, pair by pair; no key is looked at."""
    query, params = wide(query), {name: wide(x) for name, x in params.items()}
    (*batch, q_len, heads, _), (kv_len, kv_heads) = query.shape, key.shape[-3:-1]
    x = np.concatenate([np.where(query.real > 0, query, 0), np.ones((*batch, q_len, heads, 1))], -1)
    scores = np.zeros((*batch, q_len, heads, kv_len), np.result_type(query, *params.values()))
    width, places, keys = -(-op.max_len // op.rank), offset + np.arange(q_len), np.arange(kv_len)
    for head in range(heads):
        kv_head, own = head // (heads // kv_heads), x[..., head, :]
        if op.kind == "dense":
            score = own @ params["key"][kv_head, keys].T
        elif op.kind == "random":
            score = params["scores"][head][places][:, keys]
        elif op.kind == "factorized_random":
            score = params["query"][head, places] @ params["key"][kv_head, keys].T
        else:
            score = (own @ params["first"][head][:, keys // width]) * (own @ params["second"][head][:, keys % width])
        scores[..., head, :] = score
    one_hot = np.broadcast_to(np.eye(kv_len)[:, None], (*batch, kv_len, heads, kv_len))
    value = np.repeat(wide(value), heads // kv_heads, axis=-2)
    visible = full_pattern(offset + np.arange(q_len), np.arange(kv_len), op.causal)
    return attend(scores, one_hot, value, visible=visible, scale=1.0 if scale is None else scale, **options)


def reformer(op, params, query, key, value, *, offset=0, mask=None, **options):
    """Attention to unit keys of the same bucket, chunk by chunk, round by round (Kitaev et al. 2020, eq. 3-6).

    A pair of several rounds counts once (the N_ij of the appendix). Tokens without a query are hashed by their key.
    """
    (*batch, q_len, heads, head_dim), (kv_len, kv_heads) = query.shape, key.shape[-3:-1]
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, kv_len))[..., 0, :]
    rotations, size = wide(op.rotations(head_dim)), op.bucket_size
    visible = np.zeros((*batch, heads, q_len, kv_len), bool)
    for *at, head in np.ndindex(*batch, heads):
        at = tuple(at)
        tokens = np.array(wide(key)[at][:, head // (heads // kv_heads)].real)
        tokens[offset : offset + q_len] = wide(query)[at][:, head].real
        pairs = np.zeros((kv_len, kv_len), bool)
        for rotation in rotations:
            turned = tokens @ rotation
            buckets = np.concatenate([turned, -turned], -1).argmax(-1)
            order = sorted(np.flatnonzero(real[at][head]), key=lambda token: (buckets[token], token))
            last = (len(order) - 1) // size
            for (p, i), (r, j) in itertools.product(enumerate(order), repeat=2):
                chunk = p // size
                near = 0 < p - r <= size if op.causal else r // size in (chunk, chunk - 1 if chunk else last)
                pairs[i, j] |= near and buckets[i] == buckets[j] and i != j
        for i in np.flatnonzero(real[at][head]):
            pairs[i, i] = not pairs[i].any()
        visible[at][head] = pairs[offset : offset + q_len]
    key = wide(key)
    key = key / np.sqrt((key * key).sum(-1, keepdims=True))
    return _paired(lambda q, k: visible, op, params, query, key, value, offset, mask=mask, **options)


def routing(op, params, query, key, value, *, offset=0, mask=None, **options):
    """Attention between the queries and keys nearest to a centre, all centres in one softmax (Roy et al. 2021, 4.1)."""
    (*batch, q_len, heads, head_dim), (kv_len, kv_heads) = query.shape, key.shape[-3:-1]
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, kv_len))[..., 0, :]
    centres = wide((params.get("constants") or drawn(op, head_dim, heads))["centres"])
    visible = np.zeros((*batch, heads, q_len, kv_len), bool)
    for *at, head in np.ndindex(*batch, heads):
        at = tuple(at)
        q, k = wide(query)[at][:, head].real, wide(key)[at][:, head // (heads // kv_heads)].real
        for centre in centres[head]:
            chosen = []
            for x, first in ((q, offset), (k, 0)):
                near = x @ centre / np.linalg.norm(x, axis=-1)
                tokens = [i for i in np.argsort(-near, kind="stable") if real[at][head, first + i]]
                chosen.append(tokens[: op.window])
            visible[at][head][np.ix_(*chosen)] = True
    return _paired(lambda q, k: visible, op, params, query, key, value, offset, mask=mask, **options)


def sinkhorn(op, params, query, key, value, *, offset=0, mask=None, scale=None, **nothing):
    """Attention to the own block and to one mixed of all, or of those before (Tay et al. 2020, sections 3.1 to 3.3).

    Rows and columns of exponentials are divided by their sums in turn; causal sums are over what lies before.
    """
    assert offset == 0 and all(x is None for x in nothing.values())
    query, key, value = wide(query), wide(key), wide(value)
    (*batch, length, heads, head_dim), group, size = query.shape, query.shape[-2] // key.shape[-2], op.block_size
    real = np.broadcast_to(True if mask is None else np.asarray(mask) > 0, (*batch, heads, 1, length))[..., 0, :]
    scales = np.broadcast_to(1 / math.sqrt(head_dim) if scale is None else wide(scale), heads)
    blocks = [range(first, min(first + size, length)) for first in range(0, length, size)]
    out = np.zeros((*batch, length, heads, value.shape[-1]), np.result_type(query, key, value, scales))
    for *example, head in np.ndindex(*batch, heads):
        example, seen = tuple(example), real[(*example, head)]
        q, k, v = (x[example][:, head // (group if x is not query else 1)] for x in (query, key, value))
        held = [[t for t in block if seen[t]] for block in blocks]
        scores = np.full((len(blocks), len(blocks)), -np.inf, out.dtype)
        for i, j in np.ndindex(scores.shape):
            of_query = [t for t in range(blocks[i][0] + 1) if seen[t]] if op.causal else held[i]
            if held[j] and (j < i if op.causal else held[i]):
                of_query = q[of_query].mean(0) if of_query else np.zeros(head_dim)
                scores[i, j] = scales[head] * of_query @ k[held[j]].mean(0) / op.temperature
        known = scores.real > -np.inf
        for _ in range(op.num_iterations):  # on logarithms of the entries
            for axis in (1, 0):
                sums = np.zeros_like(scores)
                for i, j in np.argwhere(known):
                    so_far = slice(None) if not op.causal else slice(i + 1)
                    some = scores[i][known[i]] if axis else scores[so_far, j][known[so_far, j]]
                    sums[i, j] = (top := some.real.max()) + np.log(np.exp(some - top).sum())
                scores = np.where(known, scores - sums, scores)
        mix = np.where(known, np.exp(np.where(known, scores, 0)), 0)
        for i, block in enumerate(blocks):
            keys, values = [], []
            for place in range(size):
                sources = [(j, b[place]) for j, b in enumerate(blocks) if place < len(b) and seen[b[place]]]
                sources = [(j, t) for j, t in sources if j < i or not op.causal]
                if sources:
                    keys.append(sum(mix[i, j] * k[t] for j, t in sources))
                    values.append(sum(mix[i, j] * v[t] for j, t in sources))
            for t in block:
                own = [s for s in held[i] if s <= t or not op.causal]
                if keys or own:
                    weights = _softmax(scales[head] * np.stack([*keys, *k[own]]) @ q[t])
                    out[example][t, head] = weights @ np.stack([*values, *v[own]])
    return out

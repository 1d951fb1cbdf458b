// Dynamic Token Normalization for float32 on the CPU: the formula, the gradients and the reasons are those of
// ../separable.py. One task is a head of an image, in chunks of as many channels as a vector register holds:
// a token of a chunk is a register, and the chunk with all that is made from it stays in the core's own cache.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, BLOCK = 8, SIDE = 5;  // BLOCK and SIDE: how much the registers hold, see product and outer
#elif defined(__AVX__)
constexpr int LANES = 8, BLOCK = 6, SIDE = 3;
#else
constexpr int LANES = 4, BLOCK = 6, SIDE = 3;
#endif
typedef float V __attribute__((vector_size(4 * LANES)));
using Index = std::int64_t;

class Vectors {  // uninitialized and aligned
  public:
    explicit Vectors(Index n) : data(static_cast<V*>(::operator new(n * sizeof(V), std::align_val_t(sizeof(V))))) {}
    ~Vectors() { ::operator delete(data, std::align_val_t(sizeof(V))); }
    Vectors(const Vectors&) = delete;
    V* const data;
};

// Of a chunk that is narrower than a register: missing lanes are 0.
__attribute__((noinline)) V load_part(const float* from, Index count) {
    float lanes[LANES] = {};
    std::memcpy(lanes, from, count * sizeof(float));
    V v;
    std::memcpy(&v, lanes, sizeof(V));
    return v;
}

inline V load(const float* from, Index count = LANES) {
    if (count < LANES) return load_part(from, count);
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

inline void store(float* to, Index count, V v) {
    if (count < LANES) std::memcpy(to, &v, count * sizeof(float));
    else std::memcpy(to, &v, sizeof(V));
}

inline float sum(V v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof(V));
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    return lanes[0];
}

inline V reciprocal_root(V v) {
#ifdef __AVX512F__
    const V r = (V)_mm512_rsqrt14_ps((__m512)v);
    return r * (1.5f - 0.5f * v * r * r);  // Newton's step: from 14 bits to all
#else
    V r;
    for (int i = 0; i < LANES; ++i) r[i] = 1 / std::sqrt(v[i]);
    return r;
#endif
}

// Parts of 0..n, none longer than most and as equal as can be: part(first, size).
template <class Part> inline void split(Index n, Index most, Part part) {
    const Index parts = (n + most - 1) / most;
    for (Index i = 0; i < parts; ++i) part(n * i / parts, n * (i + 1) / parts - n * i / parts);
}

template <int N, class Load, class Store>
inline void product_block(const float* k, Index in, Index out, Index first, Load&& pair, Store&& put) {
    V a[N] = {}, b[N] = {};
    for (Index j = 0; j < in; ++j) {
        V p, q;
        pair(j, p, q);
        const float* w = k + j * out + first;
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            a[i] += w[i] * p;
            b[i] += w[i] * q;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) put(first + i, a[i], b[i]);
}

// put(i, sum_j k[j][i] p_j, sum_j k[j][i] q_j) for the pairs (p_j, q_j), with BLOCK values of i at a time.
template <class Load, class Store>
inline void product(const float* k, Index in, Index out, Load&& pair, Store&& put) {
    split(out, BLOCK, [&](Index first, Index size) {
        switch (size) {
            case 1: return product_block<1>(k, in, out, first, pair, put);
            case 2: return product_block<2>(k, in, out, first, pair, put);
            case 3: return product_block<3>(k, in, out, first, pair, put);
            case 4: return product_block<4>(k, in, out, first, pair, put);
            case 5: return product_block<5>(k, in, out, first, pair, put);
            case 6: return product_block<6>(k, in, out, first, pair, put);
            case 7: return product_block<7>(k, in, out, first, pair, put);
            default: return product_block<8>(k, in, out, first, pair, put);
        }
    });
}

template <int M, int N> inline void add_products(V (&acc)[M][N], const V* p, const V* a, bool square) {
    V right[N];
    for (int l = 0; l < N; ++l) right[l] = square ? a[l] * a[l] : a[l];
#pragma GCC unroll 8
    for (int k = 0; k < M; ++k)
#pragma GCC unroll 8
        for (int l = 0; l < N; ++l) acc[k][l] += p[k] * right[l];
}

template <int M, int N>
void outer_block(V* sums, Index n, Index steps, const V* p, const V* q, const V* a, const V* b) {
    V acc[M][N];
    for (int k = 0; k < M; ++k)
        for (int l = 0; l < N; ++l) acc[k][l] = sums[k * n + l];
    for (Index s = 0; s < steps * n; s += n) {
        add_products<M, N>(acc, p + s, a + s, false);
        add_products<M, N>(acc, q + s, b ? b + s : a + s, b == nullptr);
    }
    for (int k = 0; k < M; ++k)
        for (int l = 0; l < N; ++l) sums[k * n + l] = acc[k][l];
}

template <int M>
void outer_strip(V* sums, Index n, Index steps, const V* p, const V* q, const V* a, const V* b) {
    split(n, SIDE, [=](Index j, Index size) {
        const V* right = b ? b + j : b;
        switch (size) {
            case 1: return outer_block<M, 1>(sums + j, n, steps, p, q, a + j, right);
            case 2: return outer_block<M, 2>(sums + j, n, steps, p, q, a + j, right);
            case 3: return outer_block<M, 3>(sums + j, n, steps, p, q, a + j, right);
            case 4: return outer_block<M, 4>(sums + j, n, steps, p, q, a + j, right);
            default: return outer_block<M, 5>(sums + j, n, steps, p, q, a + j, right);
        }
    });
}

// sums[i][j] += sum_s p[s][i] a[s][j] + q[s][i] b[s][j], a lane at a time; b is the square of a where it is null.
void outer(V* sums, Index n, Index steps, const V* p, const V* q, const V* a, const V* b) {
    split(n, SIDE, [=](Index i, Index size) {
        switch (size) {
            case 1: return outer_strip<1>(sums + i * n, n, steps, p + i, q + i, a, b);
            case 2: return outer_strip<2>(sums + i * n, n, steps, p + i, q + i, a, b);
            case 3: return outer_strip<3>(sums + i * n, n, steps, p + i, q + i, a, b);
            case 4: return outer_strip<4>(sums + i * n, n, steps, p + i, q + i, a, b);
            default: return outer_strip<5>(sums + i * n, n, steps, p + i, q + i, a, b);
        }
    });
}

struct Norm {
    const float *x, *px, *py, *mix_mean, *mix_var, *weight, *bias;
    Index batch, rows, columns, channels, heads;
    float eps;
    Index unbiased, threads;

    Index tokens() const { return rows * columns; }
    Index width() const { return channels / heads; }
    bool by_image() const { return batch % threads == 0 || batch >= 4 * threads; }
};

// Mean and variance over the channels of tokens first to last of the batch.
void token_statistics(const Norm& n, Index first, Index last, float* mean, float* var) {
    for (Index t = first; t < last; ++t) {
        const float* x = n.x + t * n.channels;
        float total = 0, square = 0;
        V a = {}, b = {};
        Index i = 0;
        for (; i + 2 * LANES <= n.channels; i += 2 * LANES) a += load(x + i), b += load(x + i + LANES);
        for (; i < n.channels; ++i) total += x[i];
        const float m = (total + sum(a + b)) / n.channels;
        a = b = V{};
        for (i = 0; i + 2 * LANES <= n.channels; i += 2 * LANES) {
            const V d = load(x + i) - m, e = load(x + i + LANES) - m;
            a += d * d, b += e * e;
        }
        for (; i < n.channels; ++i) square += (x[i] - m) * (x[i] - m);
        mean[t] = m;
        var[t] = (square + sum(a + b)) / (n.channels - n.unbiased);
    }
}

// A chunk of a head of an image: xc is x less its mean over tokens; zm and zq are the products of xc and its square
// with the column kernel.
struct Chunk {
    V *xc, *zm, *zq;
    V center;
};

V centered(const Norm& n, const float* x, Index count, V* xc) {
    V center = {};
    for (Index r = 0; r < n.rows; ++r) {
        V row = {};
        for (Index t = r * n.columns; t < (r + 1) * n.columns; ++t) row += xc[t] = load(x + t * n.channels, count);
        center += row;
    }
    center /= float(n.tokens());
    for (Index t = 0; t < n.tokens(); ++t) xc[t] -= center;
    return center;
}

void column_products(const Norm& n, const float* px_t, Chunk& k) {
    for (Index r = 0; r < n.rows; ++r) {
        const V* x = k.xc + r * n.columns;
        V *zm = k.zm + r, *zq = k.zq + r;
        const Index step = n.rows;
        product(
            px_t, n.columns, n.columns, [=](Index j, V& p, V& q) { p = x[j], q = p * p; },
            [=](Index i, V a, V b) { zm[i * step] = a, zq[i * step] = b; });
    }
}

// use(row, column, m, v): the mean and the variance under the kernel.
template <class Use> void moments(const Norm& n, const float* py_t, const Chunk& k, Use&& use) {
    for (Index c = 0; c < n.columns; ++c) {
        const V *zm = k.zm + c * n.rows, *zq = k.zq + c * n.rows;
        product(
            py_t, n.rows, n.rows, [=](Index j, V& p, V& q) { p = zm[j], q = zq[j]; },
            [&](Index r, V m, V q) {
                const V v = q - m * m;
                use(r, c, m, v < 0 ? V{} : v);
            });
    }
}

std::vector<float> transposed(const float* k, Index heads, Index n) {
    std::vector<float> out(heads * n * n);
    for (Index h = 0; h < heads; ++h)
        for (Index i = 0; i < n; ++i)
            for (Index j = 0; j < n; ++j) out[(h * n + j) * n + i] = k[(h * n + i) * n + j];
    return out;
}

struct Shared {  // of all tasks
    std::vector<float> px_t, py_t, mean, var;
    explicit Shared(const Norm& n)
        : px_t(transposed(n.px, n.heads, n.columns)), py_t(transposed(n.py, n.heads, n.rows)),
          mean(n.batch * n.tokens()), var(n.batch * n.tokens()) {}
};

void forward_head(const Norm& n, const Shared& s, Index b, Index h, V* scratch, float* y) {
    const Index tokens = n.tokens(), width = n.width();
    Chunk k{scratch, scratch + tokens, scratch + 2 * tokens, {}};
    const float lm = n.mix_mean[h], lv = n.mix_var[h], *mean = &s.mean[b * tokens], *var = &s.var[b * tokens];
    for (Index d = 0; d < width; d += LANES) {
        const Index at = h * width + d, count = width - d;
        k.center = centered(n, n.x + b * tokens * n.channels + at, count, k.xc);
        column_products(n, &s.px_t[h * n.columns * n.columns], k);
        const V weight = load(n.weight + at, count), bias = load(n.bias + at, count);
        moments(n, &s.py_t[h * n.rows * n.rows], k, [&](Index row, Index column, V m, V v) {
            const Index t = row * n.columns + column;
            const V r = reciprocal_root((lv * var[t] + n.eps) + (1 - lv) * v);
            const V u = k.xc[t] - (1 - lm) * m + lm * (k.center - mean[t]);
            store(y + (b * tokens + t) * n.channels + at, count, u * r * weight + bias);
        });
    }
}

// Everything for each image, added up afterwards in one order: results do not depend on the number of threads.
struct Gradients {
    std::vector<float> px, py, mix_mean, mix_var, weight, bias, u, s;
    explicit Gradients(const Norm& n)
        : px(n.batch * n.heads * n.columns * n.columns), py(n.batch * n.heads * n.rows * n.rows),
          mix_mean(n.batch * n.heads), mix_var(n.batch * n.heads), weight(n.batch * n.channels),
          bias(n.batch * n.channels), u(n.batch * n.heads * n.tokens()), s(n.batch * n.heads * n.tokens()) {}
};

constexpr Index FORWARD_SCRATCH = 3, BACKWARD_SCRATCH = 8;  // times the tokens

void backward_head(const Norm& n, const Shared& s, const float* grad, Index b, Index h, V* scratch, float* grad_x,
                   Gradients& out) {
    const Index tokens = n.tokens(), width = n.width(), rows = n.rows, columns = n.columns;
    Chunk k{scratch, scratch + tokens, scratch + 2 * tokens, {}};
    V *gm = scratch + 3 * tokens, *gq = gm + tokens, *gu = gq + tokens, *sum_u = gu + tokens, *sum_s = sum_u + tokens;
    V *sum_px = sum_s + tokens, *sum_py = sum_px + columns * columns, total_mean = {}, total_var = {};
    std::memset(static_cast<void*>(sum_u), 0, (2 * tokens + columns * columns + rows * rows) * sizeof(V));
    const float lm = n.mix_mean[h], lv = n.mix_var[h], *mean = &s.mean[b * tokens], *var = &s.var[b * tokens];
    for (Index d = 0; d < width; d += LANES) {
        const Index at = h * width + d, count = width - d, from = b * tokens * n.channels + at;
        k.center = centered(n, n.x + from, count, k.xc);
        column_products(n, &s.px_t[h * columns * columns], k);
        for (Index t = 0; t < tokens; ++t) gu[t] = load(grad + from + t * n.channels, count);
        const V weight = load(n.weight + at, count);
        V grad_weight = {}, grad_bias = {};
        // Through the affine map, the division and the mixtures: gu, gs, gm and gq are the gradients of x - mu, of the
        // variance, and of both moments.
        moments(n, &s.py_t[h * rows * rows], k, [&](Index row, Index column, V m, V v) {
            const Index t = row * columns + column, i = column * rows + row;
            const V r = reciprocal_root((lv * var[t] + n.eps) + (1 - lv) * v);
            const V difference = m + (k.center - mean[t]);
            const V normal = (k.xc[t] - m + lm * difference) * r, g = gu[t];
            grad_weight += g * normal;
            grad_bias += g;
            const V u = g * weight * r, gs = -0.5f * u * normal * r;
            gu[t] = u;
            gq[i] = (1 - lv) * gs;
            gm[i] = (lm - 1) * u - 2 * m * gq[i];
            sum_u[t] += u;
            sum_s[t] += gs;
            total_mean += u * difference;
            total_var += gs * (var[t] - v);
        });
        store(&out.weight[b * n.channels + at], count, grad_weight);
        store(&out.bias[b * n.channels + at], count, grad_bias);
        // Through the two products of each moment; hm and hq are the gradients of zm and zq, and take their place.
        outer(sum_py, rows, columns, gm, gq, k.zm, k.zq);
        V *hm = k.zm, *hq = k.zq;
        for (Index c = 0; c < columns; ++c)
            product(n.py + h * rows * rows, rows, rows,
                    [=](Index j, V& p, V& q) { p = gm[c * rows + j], q = gq[c * rows + j]; },
                    [=](Index i, V p, V q) { hm[i * columns + c] = p, hq[i * columns + c] = q; });
        outer(sum_px, columns, rows, hm, hq, k.xc, nullptr);
        for (Index r = 0; r < rows; ++r)
            product(n.px + h * columns * columns, columns, columns,
                    [=](Index j, V& p, V& q) { p = hm[r * columns + j], q = hq[r * columns + j]; },
                    [=](Index i, V p, V q) {
                        const Index t = r * columns + i;
                        store(grad_x + from + t * n.channels, count, gu[t] + p + 2 * k.xc[t] * q);
                    });
    }
    const Index task = b * n.heads + h;
    for (Index i = 0; i < columns * columns; ++i) out.px[task * columns * columns + i] = sum(sum_px[i]);
    for (Index i = 0; i < rows * rows; ++i) out.py[task * rows * rows + i] = sum(sum_py[i]);
    for (Index t = 0; t < tokens; ++t) {
        out.u[task * tokens + t] = lm * sum(sum_u[t]);
        out.s[task * tokens + t] = lv * sum(sum_s[t]);
    }
    out.mix_mean[task] = sum(total_mean);
    out.mix_var[task] = sum(total_var);
}

// Through LayerNorm's statistics, for tokens first to last of the batch.
void backward_tokens(const Norm& n, const Shared& s, const Gradients& g, Index first, Index last, float* grad_x) {
    for (Index i = first; i < last; ++i) {
        const Index b = i / n.tokens(), t = i % n.tokens();
        float u = 0, v = 0;
        for (Index h = 0; h < n.heads; ++h) {
            u += g.u[(b * n.heads + h) * n.tokens() + t];
            v += g.s[(b * n.heads + h) * n.tokens() + t];
        }
        const float grad_mean = -u / n.channels, grad_var = 2 * v / (n.channels - n.unbiased), mean = s.mean[i];
        const float* x = n.x + i * n.channels;
        float* to = grad_x + i * n.channels;
#pragma omp simd
        for (Index c = 0; c < n.channels; ++c) to[c] += grad_mean + (x[c] - mean) * grad_var;
    }
}

// The image's tasks by one thread, while the image is in its cache, or where images are few, all threads at each.
template <class Before, class Head, class After>
void run(const Norm& n, Index scratch, Before before, Head head, After after) {
    const Index tokens = n.tokens();
#pragma omp parallel num_threads(n.threads)
    {
        Vectors own(scratch);
        if (n.by_image()) {
#pragma omp for schedule(static)
            for (Index b = 0; b < n.batch; ++b) {
                before(b * tokens, (b + 1) * tokens);
                for (Index h = 0; h < n.heads; ++h) head(b, h, own.data);
                after(b * tokens, (b + 1) * tokens);
            }
        } else {
#pragma omp for schedule(static)
            for (Index t = 0; t < n.batch * tokens; ++t) before(t, t + 1);
#pragma omp for schedule(static)
            for (Index task = 0; task < n.batch * n.heads; ++task) head(task / n.heads, task % n.heads, own.data);
#pragma omp for schedule(static)
            for (Index t = 0; t < n.batch * tokens; ++t) after(t, t + 1);
        }
    }
}

void add_images(const std::vector<float>& parts, Index batch, float* out) {
    const Index size = parts.size() / batch;
    std::memcpy(out, parts.data(), size * sizeof(float));
    for (Index b = 1; b < batch; ++b)
        for (Index i = 0; i < size; ++i) out[i] += parts[b * size + i];
}

}  // namespace

extern "C" void dynamic_token_forward(
    const float* x, const float* px, const float* py, const float* mix_mean, const float* mix_var, const float* weight,
    const float* bias, float* y, Index batch, Index rows, Index columns, Index channels, Index heads, float eps,
    Index unbiased, Index threads) {
    const Norm n{x,    px,      py,       mix_mean, mix_var, weight,   bias, batch,
                 rows, columns, channels, heads,    eps,     unbiased, threads};
    Shared s(n);
    run(n, FORWARD_SCRATCH * n.tokens(),
        [&](Index first, Index last) { token_statistics(n, first, last, s.mean.data(), s.var.data()); },
        [&](Index b, Index h, V* scratch) { forward_head(n, s, b, h, scratch, y); }, [](Index, Index) {});
}

extern "C" void dynamic_token_backward(
    const float* grad, const float* x, const float* px, const float* py, const float* mix_mean, const float* mix_var,
    const float* weight, float* grad_x, float* grad_px, float* grad_py, float* grad_mix_mean, float* grad_mix_var,
    float* grad_weight, float* grad_bias, Index batch, Index rows, Index columns, Index channels, Index heads,
    float eps, Index unbiased, Index threads) {
    const Norm n{x,    px,      py,       mix_mean, mix_var, weight,   nullptr, batch,
                 rows, columns, channels, heads,    eps,     unbiased, threads};
    Shared s(n);
    Gradients g(n);
    run(n, BACKWARD_SCRATCH * n.tokens() + columns * columns + rows * rows,
        [&](Index first, Index last) { token_statistics(n, first, last, s.mean.data(), s.var.data()); },
        [&](Index b, Index h, V* scratch) { backward_head(n, s, grad, b, h, scratch, grad_x, g); },
        [&](Index first, Index last) { backward_tokens(n, s, g, first, last, grad_x); });
    add_images(g.px, batch, grad_px);
    add_images(g.py, batch, grad_py);
    add_images(g.mix_mean, batch, grad_mix_mean);
    add_images(g.mix_var, batch, grad_mix_var);
    add_images(g.weight, batch, grad_weight);
    add_images(g.bias, batch, grad_bias);
}

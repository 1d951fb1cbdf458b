// What the norms with statistics over tokens do to whole images, x [images][tokens][channels]: moments of each
// channel, the map x * scale + shift, and the two passes of its gradient. One thread takes an image, or TILE channels
// of it, so that the sums stay in registers and an image that is read twice stays in the cache.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t TILE = 64;        // channels at a time
constexpr int64_t BLOCK = 64;       // tokens that are summed in float32 before they go to a float64 total
constexpr int64_t SMALL = 1 << 15;  // numbers below which one thread is faster

// f(image, first channel, channels) for all tiles, shared by the threads.
template <class F>
void for_tiles(int64_t images, int64_t tokens, int64_t channels, F f) {
    const int64_t tiles = (channels + TILE - 1) / TILE;
#pragma omp parallel for collapse(2) if (images * tokens * channels > SMALL)
    for (int64_t image = 0; image < images; ++image)
        for (int64_t tile = 0; tile < tiles; ++tile)
            f(image, tile * TILE, std::min(TILE, channels - tile * TILE));
}

// out[c] = sum over tokens of f(token, c). A full tile has its size known to the compiler.
template <int64_t WIDTH, class F>
void sum_tile(int64_t tokens, int64_t width, float* out, F f) {
    const int64_t n = WIDTH ? WIDTH : width;
    double total[TILE] = {};
    for (int64_t start = 0; start < tokens; start += BLOCK) {
        float sum[TILE] = {};
        for (int64_t t = start; t < std::min(tokens, start + BLOCK); ++t)
#pragma omp simd
            for (int64_t c = 0; c < n; ++c) sum[c] += f(t, c);
        for (int64_t c = 0; c < n; ++c) total[c] += sum[c];
    }
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<float>(total[c]);
}

template <class F>
void sum_over_tokens(int64_t tokens, int64_t width, float* out, F f) {
    width == TILE ? sum_tile<TILE>(tokens, width, out, f) : sum_tile<0>(tokens, width, out, f);
}

}  // namespace

extern "C" {

// Mean and biased variance, [images][channels].
void moments(const float* x, int64_t images, int64_t tokens, int64_t channels, float* mean, float* var) {
    for_tiles(images, tokens, channels, [=](int64_t image, int64_t first, int64_t width) {
        const float* in = x + image * tokens * channels + first;
        float *m = mean + image * channels + first, *v = var + image * channels + first;
        const float share = 1 / static_cast<float>(tokens);
        sum_over_tokens(tokens, width, m, [=](int64_t t, int64_t c) { return in[t * channels + c]; });
        for (int64_t c = 0; c < width; ++c) m[c] *= share;
        sum_over_tokens(tokens, width, v, [=](int64_t t, int64_t c) {
            const float d = in[t * channels + c] - m[c];
            return d * d;
        });
        for (int64_t c = 0; c < width; ++c) v[c] *= share;
    });
}

// y = x scale + shift; a step is how far the next image's scale or shift lies: channels, or 0 if all share one.
void scale_shift(const float* x, const float* scale, const float* shift, int64_t images, int64_t tokens,
                 int64_t channels, int64_t scale_step, int64_t shift_step, float* y) {
#pragma omp parallel for if (images * tokens * channels > SMALL)
    for (int64_t row = 0; row < images * tokens; ++row) {
        const int64_t image = row / tokens;
        const float *in = x + row * channels, *a = scale + image * scale_step, *b = shift + image * shift_step;
        float* out = y + row * channels;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) out[c] = in[c] * a[c] + b[c];
    }
}

// Sums over tokens of grad x and of grad, [images][channels].
void scale_shift_sums(const float* grad, const float* x, int64_t images, int64_t tokens, int64_t channels,
                      float* sum_grad_x, float* sum_grad) {
    for_tiles(images, tokens, channels, [=](int64_t image, int64_t first, int64_t width) {
        const int64_t at = image * tokens * channels + first;
        const float *d = grad + at, *in = x + at;
        float *sx = sum_grad_x + image * channels + first, *s = sum_grad + image * channels + first;
        sum_over_tokens(tokens, width, sx, [=](int64_t t, int64_t c) { return d[t * channels + c] * in[t * channels + c]; });
        sum_over_tokens(tokens, width, s, [=](int64_t t, int64_t c) { return d[t * channels + c]; });
    });
}

// dx = grad scale + x slope + offset; slope and offset are each image's own.
void scale_shift_backward(const float* grad, const float* x, const float* scale, const float* slope,
                          const float* offset, int64_t images, int64_t tokens, int64_t channels, int64_t step,
                          float* dx) {
#pragma omp parallel for if (images * tokens * channels > SMALL)
    for (int64_t row = 0; row < images * tokens; ++row) {
        const int64_t image = row / tokens;
        const float *d = grad + row * channels, *in = x + row * channels, *a = scale + image * step;
        const float *s = slope + image * channels, *o = offset + image * channels;
        float* out = dx + row * channels;
#pragma omp simd
        for (int64_t c = 0; c < channels; ++c) out[c] = d[c] * a[c] + in[c] * s[c] + o[c];
    }
}
}
